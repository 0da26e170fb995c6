//! Reads documents from files for `preprocess` and `pretrain --data`: text, JSON lines, Parquet and Arrow.
//!
//! [`find`] lists the files, and detects their kinds from their first bytes. [`Input::open`] returns the documents of
//! a file in order, and [`DocumentContent::texts`] returns the texts of a document.

mod conversation;
mod counting_reader;
mod counts;
mod error;
mod extension;
mod find;
mod format;
mod hugging_face;
mod input;
mod magic;
mod record;
mod source;
mod split;
mod table;
#[cfg(test)]
mod tests;

pub use conversation::is_conversation;
pub use counts::FileCounts;
pub use error::{BadDocument, DocumentPosition, InputError};
pub use find::{FindOptions, Format, Found, find};
pub use format::DocumentFormat;
pub use input::Input;
pub use source::DocumentContent;
pub use split::NextDocument;

/// The extensions of text files in a folder.
pub const TEXT: [&str; 3] = burn_megatron_data::EXTENSIONS;

/// The extensions of files of records in a folder. The texts of a record are under a key.
pub const RECORDS: [&str; 4] = ["jsonl", "ndjson", "parquet", "arrow"];

/// The default key of the text in a record.
pub const TEXT_KEY: &str = "text";
