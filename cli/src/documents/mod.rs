//! The documents of files, as `preprocess` and `pretrain --data` read them: text, JSON lines, Parquet and Arrow.
//!
//! [`find`] lists the files and tells by their first bytes what they are, [`Input::open`] returns their documents one
//! after the other, and [`DocumentContent::texts`] their texts.

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

/// The extensions of text in a folder.
pub const TEXT: [&str; 3] = burn_megatron_data::EXTENSIONS;

/// The extensions of files of records in a folder, whose texts are under a key.
pub const RECORDS: [&str; 4] = ["jsonl", "ndjson", "parquet", "arrow"];

/// The key of the text of a record by default.
pub const TEXT_KEY: &str = "text";
