//! Which tokens make up which sample: the sampling of GPT that Megatron has, to the last number.
//!
//! 1. [`Split`] gives each of the three parts (training, validation, test) a range of the sequences of a file.
//! 2. [`Epochs`] says how often a part is gone through so that there are enough samples.
//! 3. The *document index* has the sequences of all epochs in a random order.
//! 4. The *sample index* walks over them end to end and says where each sample begins. Samples have `seq + 1`
//!    tokens, of which the last is the first of the next.
//! 5. The *shuffle index* has the samples in a random order.
//!
//! Both orders are those of NumPy's `RandomState`, see [`RandomState`]. The three indices can be kept in a
//! [`Cache`], as `.npy` files.

mod array;
mod cache;
mod dataset;
mod epochs;
mod error;
mod index;
mod random_state;
mod split;

pub use array::{Array, Int, IntType};
pub use cache::Cache;
pub use dataset::{FiniteSamples, GptDataset, GptOptions};
pub use epochs::Epochs;
pub use error::{CacheError, SamplingError};
pub use index::Indices;
pub use random_state::RandomState;
pub use split::{Part, Split};

pub(super) use dataset::{check_vocabulary, part_range};

#[cfg(test)]
mod tests;
