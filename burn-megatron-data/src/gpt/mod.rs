//! Megatron's GPT sampling, reproduced exactly: which tokens are in which sample.
//!
//! 1. [`Split`] gives each of the three parts (training, validation, test) a range of the sequences of a file.
//! 2. [`Epochs`] gives how often a part is repeated to get enough samples.
//! 3. The *document index* has the sequences of all epochs in a random order.
//! 4. The *sample index* has the start of each sample in the concatenated sequences. Samples have `seq + 1`
//!    tokens, of which the last is also the first of the next sample.
//! 5. The *shuffle index* has the samples in a random order.
//!
//! Both orders are those of NumPy's `RandomState`, see [`RandomState`]. The three indices can be kept in a
//! [`IndexCache`], as `.npy` files.

mod cache;
mod dataset;
mod epochs;
mod error;
mod index;
mod npy;
mod random_state;
mod split;

pub use cache::IndexCache;
pub use dataset::{FiniteSamples, GptDataset, GptOptions};
pub use epochs::Epochs;
pub use error::{CacheError, SamplingError};
pub use index::GptIndices;
pub use npy::{NpyArray, NpyInt, NpyType};
pub use random_state::RandomState;
pub use split::{Split, SplitPart};

pub(super) use dataset::{check_vocabulary, part_range};

#[cfg(test)]
mod tests;
