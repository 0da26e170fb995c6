//! What can be wrong with token files.

use std::io;
use std::path::PathBuf;

/// Why token files cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum IndexedError {
    /// There is no such file.
    #[error("there is no '{}': token files are PREFIX.bin and PREFIX.idx, named by their PREFIX", .0.display())]
    Missing(PathBuf),
    /// The operating system refused.
    #[error("cannot {what} '{}': {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// The reason that the operating system gives.
        source: io::Error,
    },
    /// The index is not one, or contradicts the tokens.
    #[error("'{}' is not a whole index: {source}", path.display())]
    Malformed {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        source: MalformedIndex,
    },
    /// There is something under the final name.
    #[error("'{}' is there already", .0.display())]
    Exists(PathBuf),
    /// A sequence that the file does not have.
    #[error("'{}' has {sequences} sequences, and no number {sequence}", path.display())]
    NoSuchSequence {
        /// The tokens.
        path: PathBuf,
        /// Those it has.
        sequences: usize,
        /// The one that was asked for, counted from 0.
        sequence: usize,
    },
    /// Tokens past the end of a sequence.
    #[error(
        "sequence {sequence} of '{}' has {length} tokens, so there are no {wanted} from number {offset} on",
        path.display()
    )]
    PastEnd {
        /// The tokens.
        path: PathBuf,
        /// The sequence.
        sequence: usize,
        /// Its tokens.
        length: usize,
        /// The first that was asked for.
        offset: usize,
        /// How many were asked for.
        wanted: usize,
    },
    /// A token that no model can read.
    #[error(
        "sequence {sequence} of '{}' has the token {token}; tokens are 0 to {}", path.display(), i32::MAX
    )]
    BadToken {
        /// The tokens.
        path: PathBuf,
        /// The sequence.
        sequence: usize,
        /// Its token.
        token: i64,
    },
    /// A token that the type of the file cannot hold.
    #[error("the token {token} does not fit '{}', whose tokens are at most {max}", path.display())]
    TokenTooLarge {
        /// The file that is written.
        path: PathBuf,
        /// The token.
        token: u32,
        /// The largest that fits.
        max: u64,
    },
    /// A sequence whose length the index cannot hold.
    #[error("a sequence of {tokens} tokens does not fit '{}': at most {}", path.display(), i32::MAX)]
    SequenceTooLong {
        /// The file that is written.
        path: PathBuf,
        /// Its tokens.
        tokens: usize,
    },
    /// Files of different types cannot be joined.
    #[error(
        "'{}' has tokens of type {found:?}, and cannot be appended to a file of {wanted:?}", path.display()
    )]
    OtherType {
        /// The file that was to be appended.
        path: PathBuf,
        /// Its type.
        found: super::TokenType,
        /// That of the file that is written.
        wanted: super::TokenType,
    },
    /// Sequences that belong to no document.
    #[error("the last {sequences} sequence(s) of '{}' belong to no document: end it", path.display())]
    OpenDocument {
        /// The file that is written.
        path: PathBuf,
        /// How many.
        sequences: usize,
    },
}

/// What is wrong with the bytes of an index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MalformedIndex {
    /// Not an index at all.
    #[error("it does not begin with MMIDIDX and two zero bytes")]
    Magic,
    /// Of another time.
    #[error("its version is {0}, and 1 is read")]
    Version(u64),
    /// The tokens are no tokens.
    #[error("its type has code {code}, that of floats: tokens are integers")]
    FloatTokens {
        /// The code.
        code: u8,
    },
    /// The tokens are of no known type.
    #[error("its type has code {code}; integers have 1 to 5 and 8")]
    Code {
        /// The code.
        code: u8,
    },
    /// The file ends too early, or too late.
    #[error(
        "it has {found} bytes, but {sequences} sequences and {documents} document indices take {needed}"
    )]
    Size {
        /// Bytes it has.
        found: usize,
        /// Sequences by its header.
        sequences: u64,
        /// Document indices by its header.
        documents: u64,
        /// Bytes they take; more than any file has where the number is too large.
        needed: u128,
    },
    /// Shorter than any index.
    #[error("it has {found} bytes, less than the 34 of a header")]
    Short {
        /// Bytes it has.
        found: usize,
    },
    /// There is not even a 0 where the documents begin.
    #[error("it has no document indices, and the first must be 0")]
    NoDocuments,
    /// A length below zero.
    #[error("sequence {sequence} has a length of {length}")]
    Length {
        /// The sequence.
        sequence: usize,
        /// Its length.
        length: i32,
    },
    /// A sequence that does not lie in the tokens.
    #[error(
        "sequence {sequence} has {length} tokens from byte {pointer} on, and the .bin file has {bin_bytes} bytes"
    )]
    Pointer {
        /// The sequence.
        sequence: usize,
        /// Where it begins.
        pointer: i64,
        /// Its tokens.
        length: i32,
        /// Bytes of the tokens.
        bin_bytes: u64,
    },
    /// Documents that do not follow one another from the first to the last sequence.
    #[error(
        "document index {number} is {found}; they rise from 0 to the number of sequences, {sequences}, and the one before is {before}"
    )]
    Documents {
        /// The number of the document index.
        number: usize,
        /// What stands there.
        found: i64,
        /// What stands before it; 0 before the first.
        before: i64,
        /// The number of sequences.
        sequences: usize,
    },
    /// Not text.
    #[error("sequence {sequence} has mode {mode}, another medium than text, which has 0")]
    Mode {
        /// The sequence.
        sequence: usize,
        /// Its mode.
        mode: i8,
    },
}
