//! Errors of reading and writing token files.

use std::io;
use std::path::PathBuf;

/// An error that occurred while token files were read or written.
#[derive(Debug, thiserror::Error)]
pub enum IndexedDatasetError {
    /// The file does not exist.
    #[error("there is no '{}': token files are PREFIX.bin and PREFIX.idx, named by their PREFIX", .0.display())]
    Missing(PathBuf),
    /// A file system operation failed.
    #[error("cannot {what} '{}': {source}", path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The index file is invalid, or does not match the file of tokens.
    #[error("'{}' is not a valid index: {source}", path.display())]
    Malformed {
        /// The path of the index file.
        path: PathBuf,
        /// The reason.
        source: MalformedIndex,
    },
    /// The file already exists.
    #[error("'{}' already exists", .0.display())]
    Exists(PathBuf),
    /// The requested sequence does not exist.
    #[error("'{}' has no sequence {sequence}: it has {sequences}", path.display())]
    NoSuchSequence {
        /// The path of the file of tokens.
        path: PathBuf,
        /// The number of sequences.
        sequences: usize,
        /// The index of the requested sequence, counted from 0.
        sequence: usize,
    },
    /// The requested range of tokens extends beyond the end of the sequence.
    #[error(
        "sequence {sequence} of '{}' has {length} tokens: cannot read {wanted} from {offset} on",
        path.display()
    )]
    PastEnd {
        /// The path of the file of tokens.
        path: PathBuf,
        /// The index of the sequence.
        sequence: usize,
        /// The number of tokens of the sequence.
        length: usize,
        /// The offset of the first requested token.
        offset: usize,
        /// The number of requested tokens.
        wanted: usize,
    },
    /// A token is negative or too large for an `i32`.
    #[error(
        "sequence {sequence} of '{}' has the token {token}; tokens are 0 to {}", path.display(), i32::MAX
    )]
    BadToken {
        /// The path of the file of tokens.
        path: PathBuf,
        /// The index of the sequence.
        sequence: usize,
        /// The invalid token.
        token: i64,
    },
    /// A token is too large for the token type of the file.
    #[error("the token {token} does not fit '{}', whose tokens are at most {max}", path.display())]
    TokenTooLarge {
        /// The path of the file that is written.
        path: PathBuf,
        /// The invalid token.
        token: u32,
        /// The largest valid token.
        max: u64,
    },
    /// The length of the sequence is too large for the index.
    #[error("a sequence of {tokens} tokens does not fit '{}': at most {}", path.display(), i32::MAX)]
    SequenceTooLong {
        /// The path of the file that is written.
        path: PathBuf,
        /// The number of tokens of the sequence.
        tokens: usize,
    },
    /// The file to append has another token type.
    #[error(
        "'{}' has tokens of type {found:?}, and cannot be appended to a file of {wanted:?}", path.display()
    )]
    OtherType {
        /// The path of the file to append.
        path: PathBuf,
        /// The token type of the file to append.
        found: super::TokenType,
        /// The token type of the file that is written.
        wanted: super::TokenType,
    },
    /// There are sequences after the end of the last document.
    #[error("the last {sequences} sequence(s) of '{}' are in no document: call end_document", path.display())]
    OpenDocument {
        /// The path of the file that is written.
        path: PathBuf,
        /// The number of sequences after the end of the last document.
        sequences: usize,
    },
}

/// The reason why an index file is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MalformedIndex {
    /// The magic bytes are missing.
    #[error("it does not begin with MMIDIDX and two zero bytes")]
    Magic,
    /// The version of the format is not supported.
    #[error("unsupported version {0}: expected 1")]
    Version(u64),
    /// The token type is a floating-point type.
    #[error("its token type has code {code}, which is floating-point: expected an integer type")]
    FloatTokens {
        /// The code of the token type.
        code: u8,
    },
    /// The token type is unknown.
    #[error("unknown token type {code}: expected 1 to 5 or 8")]
    Code {
        /// The code of the token type.
        code: u8,
    },
    /// The size of the index file does not match the numbers in its header.
    #[error(
        "it has {found} bytes, but {sequences} sequences and {documents} document indices take {needed}"
    )]
    Size {
        /// The size of the index file in bytes.
        found: usize,
        /// The number of sequences in the header.
        sequences: u64,
        /// The number of document indices in the header.
        documents: u64,
        /// The size of the index file that follows from the header, in bytes.
        needed: u128,
    },
    /// The index file is shorter than its header.
    #[error("it has {found} bytes, less than the 34 of a header")]
    Short {
        /// The size of the index file in bytes.
        found: usize,
    },
    /// The index has no document indices.
    #[error("it has no document indices: expected at least the first, 0")]
    NoDocuments,
    /// A sequence has a negative length.
    #[error("sequence {sequence} has a length of {length}")]
    Length {
        /// The index of the sequence.
        sequence: usize,
        /// The length of the sequence.
        length: i32,
    },
    /// A sequence extends beyond the end of the file of tokens.
    #[error(
        "sequence {sequence} has {length} tokens from byte {pointer} on, and the .bin file has {bin_bytes} bytes"
    )]
    Pointer {
        /// The index of the sequence.
        sequence: usize,
        /// The byte offset of the sequence.
        pointer: i64,
        /// The number of tokens of the sequence.
        length: i32,
        /// The size of the .bin file.
        bin_bytes: u64,
    },
    /// The document indices are not in ascending order from 0 to the number of sequences.
    #[error(
        "document index {number} is {found}, after {before}: expected ascending values from 0 to the number of sequences, {sequences}"
    )]
    Documents {
        /// The position of the document index.
        number: usize,
        /// The value of the document index.
        found: i64,
        /// The value of the previous document index, or 0 for the first document index.
        before: i64,
        /// The number of sequences.
        sequences: usize,
    },
    /// A sequence has a mode other than text.
    #[error("sequence {sequence} has mode {mode}: expected 0, which is text")]
    Mode {
        /// The index of the sequence.
        sequence: usize,
        /// The mode of the sequence.
        mode: i8,
    },
}
