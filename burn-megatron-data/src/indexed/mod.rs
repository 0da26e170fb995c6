//! The indexed dataset of Megatron. The tokens are in `PREFIX.bin`, and the lengths and offsets of the sequences are in
//! `PREFIX.idx`.
//!
//! The index file has the following format. All numbers are little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 0 to 8 | `MMIDIDX`, and two zero bytes |
//! | 9 to 16 | version, a `u64` of 1 |
//! | 17 | the type of the tokens, see [`TokenType`] |
//! | 18 to 25 | the number `S` of sequences, a `u64` |
//! | 26 to 33 | the number `D` of document indices, a `u64`: one more than there are documents |
//! | 34 and on | `S` lengths in tokens as `i32`, `S` pointers in bytes as `i64`, `D` document indices as `i64` |
//!
//! Document `d` consists of the sequences from document index `d` up to, but not including, document index `d + 1`.
//! Multimodal files end with an `i8` mode per sequence. This library only supports the mode 0, which is text.
//!
//! ```no_run
//! use burn_megatron_data::indexed::{IndexedDataset, IndexedDatasetBuilder, TokenType};
//!
//! let mut writer = IndexedDatasetBuilder::create("corpus".as_ref(), TokenType::for_vocabulary(50_257))?;
//! writer.document(&[464, 3290, 50_256])?;
//! writer.finish()?;
//! let file = IndexedDataset::open("corpus".as_ref())?;
//! assert_eq!(file.sequence(0)?, [464, 3290, 50_256]);
//! # Ok::<(), burn_megatron_data::indexed::IndexedDatasetError>(())
//! ```

mod error;
mod file;
mod header;
mod replacement;
mod token_type;
mod writer;

pub use error::{IndexedDatasetError, MalformedIndex};
pub use file::IndexedDataset;
pub use header::IndexHeader;
pub use token_type::TokenType;
pub use writer::{IndexedDatasetBuilder, WriteSummary};

use std::path::{Path, PathBuf};

/// Returns the path of the file of tokens: `PREFIX.bin`.
pub fn bin_path(prefix: &Path) -> PathBuf {
    with_ending(prefix, ".bin")
}

/// Returns the path of the index file: `PREFIX.idx`.
pub fn idx_path(prefix: &Path) -> PathBuf {
    with_ending(prefix, ".idx")
}

/// Appends an extension. The prefix may contain dots.
pub(super) fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

#[cfg(test)]
mod tests;
