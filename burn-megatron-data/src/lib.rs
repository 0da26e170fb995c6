//! Training and evaluation data for language models.
//!
//! A [`Dataset`] provides [`Samples`]. Samples are numbered, and the sample with a given number is the same in every
//! layout and after every restart.
//!
//! The simplest data set is byte-level text. [`TextData::open`] reads a file or a folder, and splits it into a training
//! text and a held-out text. Every byte is a token, so the vocabulary has [`VOCABULARY`] entries and no tokenizer is
//! needed.
//!
//! ```no_run
//! use burn_megatron_data::{Samples, TextData};
//!
//! let text = TextData::open("docs".as_ref())?;
//! let batch = text.samples(128, 42)?.batch(0..8)?; // samples 0 to 7
//! assert_eq!(batch.tokens().len(), 8 * 128);
//! # Ok::<(), burn_megatron_data::DataError>(())
//! ```
//!
//! Larger corpora are tokenized once into token files. [`TokenFiles`] reads Megatron's format while the run trains. It
//! splits, samples and blends the files like Megatron.
//!
//! | | |
//! |---|---|
//! | [`indexed`] | Megatron's indexed dataset: tokens, and the offsets of sequences |
//! | [`gpt`] | Megatron's GPT sampling: the assignment of tokens to samples, and the order of samples |
//! | [`blend`] | blends of several data sets, by weight |
//! | `chat` | with the feature `tokenizers`: conversations for fine-tuning; by default only the answers have a loss |
//! | [`hybrid_context`] | hybrid context parallelism: the length of a sample determines its number of ranks |
//! | [`PackedSamples`] | several documents per sample, without attention between them |
//! | [`Prefetcher`] | prefetches batches while the model computes |

mod batch;
pub mod blend;
#[cfg(feature = "tokenizers")]
pub mod chat;
mod dataset;
mod documents;
mod error;
mod files;
mod further;
pub mod gpt;
pub mod hybrid_context;
pub mod indexed;
mod pack;
mod prefetch;
mod sampler;
mod split;
mod text;
mod token_files;
mod tokenized;
pub mod tokenizer;

pub use batch::{Batch, Padding};
pub use dataset::{Dataset, Sample, Samples, Sampling};
pub use documents::TextDocuments;
pub use error::{DataError, TextPart};
pub use files::list_folder;
pub use further::FurtherTokens;
pub use pack::PackedSamples;
pub use prefetch::{PrefetchStats, Prefetcher};
pub use sampler::TextSamples;
pub use text::{EXTENSIONS, TextData};
pub use token_files::{TokenFile, TokenFiles, TokenFilesConfig};
pub use tokenized::{TokenizedSamples, TokenizedText};

/// The vocabulary size of byte-level text: one token per byte value.
pub const VOCABULARY: usize = 256;

/// The target value that the loss ignores.
pub const IGNORE: i32 = -1;

/// The byte that separates two documents.
pub const DOCUMENT_END: u8 = 0;

#[cfg(all(test, feature = "tokenizers"))]
pub(crate) use chat::{chat_mask, chat_messages};

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;
