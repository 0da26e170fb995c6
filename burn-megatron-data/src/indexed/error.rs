//! Errors of token files.

use std::io;
use std::path::PathBuf;

/// An error of reading or writing token files.
#[derive(Debug, thiserror::Error)]
pub enum IndexedDatasetError {
    /// The file does not exist.
    #[error("there is no '{}': token files are PREFIX.bin and PREFIX.idx, named by their PREFIX", .0.display())]
    Missing(PathBuf),
    /// A file system operation failed.
    #[error("cannot {what} '{}': {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The index is invalid, or does not match the tokens.
    #[error("'{}' is not a valid index: {source}", path.display())]
    Malformed {
        /// The index.
        path: PathBuf,
        /// The reason.
        source: MalformedIndex,
    },
    /// The file already exists.
    #[error("'{}' already exists", .0.display())]
    Exists(PathBuf),
    /// There is no such sequence.
    #[error("'{}' has no sequence {sequence}: it has {sequences}", path.display())]
    NoSuchSequence {
        /// The file of tokens.
        path: PathBuf,
        /// The number of sequences.
        sequences: usize,
        /// The requested sequence, from 0.
        sequence: usize,
    },
    /// The range exceeds the end of a sequence.
    #[error(
        "sequence {sequence} of '{}' has {length} tokens: cannot read {wanted} from {offset} on",
        path.display()
    )]
    PastEnd {
        /// The file of tokens.
        path: PathBuf,
        /// The sequence.
        sequence: usize,
        /// The number of its tokens.
        length: usize,
        /// The first requested token.
        offset: usize,
        /// The number of requested tokens.
        wanted: usize,
    },
    /// The token is not a valid index into a vocabulary.
    #[error(
        "sequence {sequence} of '{}' has the token {token}; tokens are 0 to {}", path.display(), i32::MAX
    )]
    BadToken {
        /// The file of tokens.
        path: PathBuf,
        /// The sequence.
        sequence: usize,
        /// The token.
        token: i64,
    },
    /// The token exceeds the range of the file's token type.
    #[error("the token {token} does not fit '{}', whose tokens are at most {max}", path.display())]
    TokenTooLarge {
        /// The file being written.
        path: PathBuf,
        /// The token.
        token: u32,
        /// The largest valid token.
        max: u64,
    },
    /// The length of the sequence does not fit the index.
    #[error("a sequence of {tokens} tokens does not fit '{}': at most {}", path.display(), i32::MAX)]
    SequenceTooLong {
        /// The file being written.
        path: PathBuf,
        /// The number of its tokens.
        tokens: usize,
    },
    /// The appended file has another token type.
    #[error(
        "'{}' has tokens of type {found:?}, and cannot be appended to a file of {wanted:?}", path.display()
    )]
    OtherType {
        /// The file to append.
        path: PathBuf,
        /// Its token type.
        found: super::TokenType,
        /// The token type of the file being written.
        wanted: super::TokenType,
    },
    /// There are sequences after the end of the last document.
    #[error("the last {sequences} sequence(s) of '{}' are in no document: call end_document", path.display())]
    OpenDocument {
        /// The file being written.
        path: PathBuf,
        /// The number of such sequences.
        sequences: usize,
    },
}

/// An invalid index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MalformedIndex {
    /// The magic bytes are missing.
    #[error("it does not begin with MMIDIDX and two zero bytes")]
    Magic,
    /// Unsupported version of the format.
    #[error("unsupported version {0}: expected 1")]
    Version(u64),
    /// A floating-point token type.
    #[error("its token type has code {code}, which is floating-point: expected an integer type")]
    FloatTokens {
        /// The code.
        code: u8,
    },
    /// An unknown token type.
    #[error("unknown token type {code}: expected 1 to 5 or 8")]
    Code {
        /// The code.
        code: u8,
    },
    /// The size does not match the header.
    #[error(
        "it has {found} bytes, but {sequences} sequences and {documents} document indices take {needed}"
    )]
    Size {
        /// The size in bytes.
        found: usize,
        /// The number of sequences in the header.
        sequences: u64,
        /// The number of document indices in the header.
        documents: u64,
        /// The required size, in bytes.
        needed: u128,
    },
    /// The index is shorter than a header.
    #[error("it has {found} bytes, less than the 34 of a header")]
    Short {
        /// The size in bytes.
        found: usize,
    },
    /// There are no document indices.
    #[error("it has no document indices: expected at least the first, 0")]
    NoDocuments,
    /// A sequence has a negative length.
    #[error("sequence {sequence} has a length of {length}")]
    Length {
        /// The sequence.
        sequence: usize,
        /// Its length.
        length: i32,
    },
    /// A sequence exceeds the end of the tokens.
    #[error(
        "sequence {sequence} has {length} tokens from byte {pointer} on, and the .bin file has {bin_bytes} bytes"
    )]
    Pointer {
        /// The sequence.
        sequence: usize,
        /// Its byte offset.
        pointer: i64,
        /// The number of its tokens.
        length: i32,
        /// The size of the .bin file.
        bin_bytes: u64,
    },
    /// The document indices do not ascend from 0 to the number of sequences.
    #[error(
        "document index {number} is {found}, after {before}: expected ascending values from 0 to the number of sequences, {sequences}"
    )]
    Documents {
        /// The position of the document index.
        number: usize,
        /// Its value.
        found: i64,
        /// The value before it; 0 for the first.
        before: i64,
        /// The number of sequences.
        sequences: usize,
    },
    /// A sequence has a mode other than text.
    #[error("sequence {sequence} has mode {mode}: expected 0, which is text")]
    Mode {
        /// The sequence.
        sequence: usize,
        /// Its mode.
        mode: i8,
    },
}
