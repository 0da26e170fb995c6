//! The GPT data set of Megatron, which assigns tokens to samples. The order of the samples is exactly the same as in
//! Megatron.
//!
//! 1. [`Split`] assigns a range of the sequences of a file to each part: training, validation and test.
//! 2. [`Epochs`] computes how often a part must be repeated to get enough samples.
//! 3. The *document index* lists the sequences of all epochs in a random order.
//! 4. The *sample index* contains the start of each sample in the concatenated sequences. Samples have `seq + 1`
//!    tokens, and the last token of a sample is also the first token of the next sample.
//! 5. The *shuffle index* lists the samples in a random order.
//!
//! Both random orders are the same as with NumPy's `RandomState`: see [`RandomState`]. An [`IndexCache`] can store the
//! three indices as `.npy` files.

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
