//! Byte-level text: the data set of a quick start.
//!
//! [`TextData::open`] reads a file or a folder and splits it into a training and a held-out text.
//! Every byte is a token, so the vocabulary has [`VOCABULARY`] entries and there is no tokenizer. A
//! [`Sampler`] cuts training windows out of the text; which bytes a sample holds depends on the
//! seed, the step and the number of the sample alone, so it is the same under every layout and
//! after every restart.
//!
//! ```no_run
//! use burn_megatron::data::TextData;
//!
//! let text = TextData::open("docs".as_ref())?;
//! let sampler = text.sampler(128, 42)?;
//! let batch = sampler.batch(0, 0..8)?; // step 0, samples 0 to 7
//! assert_eq!(batch.tokens.len(), 8 * 128);
//! # Ok::<(), burn_megatron::data::DataError>(())
//! ```

mod batch;
mod error;
mod files;
mod sampler;
mod split;
mod text;

pub use batch::{Batch, Window};
pub use error::{DataError, TextPart};
pub use sampler::Sampler;
pub use text::{EXTENSIONS, TextData};

/// The number of different tokens: one for every value of a byte.
pub const VOCABULARY: usize = 256;

/// The byte that stands between two documents.
pub const DOCUMENT_END: u8 = 0;

#[cfg(test)]
pub(crate) mod test_folder;
#[cfg(test)]
mod tests;
