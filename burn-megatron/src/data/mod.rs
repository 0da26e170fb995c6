//! What a run is trained on.
//!
//! A [`Dataset`] gives [`Samples`], which are known by their numbers alone: the same under every layout,
//! and after every restart.
//!
//! The data set of a quick start is byte-level text. [`TextData::open`] reads a file or a folder and
//! splits it into a training and a held-out text. Every byte is a token, so the vocabulary has
//! [`VOCABULARY`] entries and there is no tokenizer.
//!
//! ```no_run
//! use burn_megatron::data::{Samples, TextData};
//!
//! let text = TextData::open("docs".as_ref())?;
//! let batch = text.samples(128, 42)?.batch(0..8)?; // samples 0 to 7
//! assert_eq!(batch.tokens.len(), 8 * 128);
//! # Ok::<(), burn_megatron::data::DataError>(())
//! ```
//!
//! Text of any size is tokenised once and kept in token files: [`TokenFiles`] are Megatron's, read from disk
//! as they are needed, split, sampled and blended as Megatron does it.
//!
//! | | |
//! |---|---|
//! | [`indexed`] | the files: tokens, and where each sequence lies |
//! | [`gpt`] | which tokens make up which sample, in which order |
//! | [`blend`] | several files as one, by weight |
//! | [`Packed`] | documents side by side in rows, of which none sees the others |
//! | [`ReadAhead`] | batches that are read while the model computes |

mod batch;
pub mod blend;
mod dataset;
mod error;
mod files;
pub mod gpt;
pub mod indexed;
mod pack;
mod read_ahead;
mod sampler;
mod split;
mod text;
mod token_files;
mod tokenized;

pub use batch::Batch;
pub use dataset::{Dataset, Sample, Samples, Sampling};
pub use error::{DataError, TextPart};
pub use files::list_folder;
pub use pack::Packed;
pub use read_ahead::{ReadAhead, Waits};
pub use sampler::TextSamples;
pub use text::{EXTENSIONS, TextData};
pub use token_files::{TokenFile, TokenFiles, TokenFilesConfig};
pub use tokenized::{TokenizedSamples, TokenizedText};

/// The number of different tokens of byte-level text: one for every value of a byte.
pub const VOCABULARY: usize = 256;

/// A target that has no loss.
pub const IGNORE: i32 = -1;

/// The byte that stands between two documents.
pub const DOCUMENT_END: u8 = 0;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
pub(crate) mod test_folder;
#[cfg(test)]
mod tests;
