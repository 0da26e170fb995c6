//! An exact reproduction of Megatron's GPT sampling: it assigns tokens to samples.
//!
//! 1. [`Split`] assigns a range of the sequences of a file to each part: training, validation and test.
//! 2. [`Epochs`] is the number of times a part is repeated to get enough samples.
//! 3. The *document index* has the sequences of all epochs in a random order.
//! 4. The *sample index* has the start of each sample in the concatenated sequences. Samples have `seq + 1` tokens, and
//!    the last token is also the first token of the next sample.
//! 5. The *shuffle index* has the samples in a random order.
//!
//! Both random orders are equal to the orders of NumPy's `RandomState`: see [`RandomState`]. An [`IndexCache`] can
//! store the three indices as `.npy` files.

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
