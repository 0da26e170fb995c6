//! Parses and validates an index file, whose bytes are not trusted.

use std::ops::Range;

use super::token_type::{word, words};
use super::{MalformedIndex, TokenType};

pub(super) const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
pub(super) const VERSION: u64 = 1;
/// The size of the header in bytes.
const HEADER: usize = 34;

/// The header of an index file. The sizes in the header have been compared with the number of bytes of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexHeader {
    /// The type in which tokens are stored.
    pub token_type: TokenType,
    /// The number of sequences.
    pub sequences: usize,
    /// The number of document indices, which is at least 1.
    pub document_indices: usize,
    /// Whether the index ends with one mode per sequence.
    pub has_modes: bool,
}

impl IndexHeader {
    /// Parses the header of an index file. `index` contains all bytes of the file. The function does not allocate
    /// memory.
    ///
    /// # Errors
    ///
    /// [`MalformedIndex`] if the header is invalid, or if the number of bytes does not match the header.
    pub fn parse(index: &[u8]) -> Result<Self, MalformedIndex> {
        let found = index.len();
        if found < MAGIC.len() || index[..MAGIC.len()] != MAGIC {
            return Err(MalformedIndex::Magic);
        }
        if found < HEADER {
            return Err(MalformedIndex::Short { found });
        }
        let number = |at| u64::from_le_bytes(word(index, at));
        let (version, sequences, documents) = (number(9), number(18), number(26));
        if version != VERSION {
            return Err(MalformedIndex::Version(version));
        }
        let token_type = TokenType::from_code(index[17])?;
        if documents == 0 {
            return Err(MalformedIndex::NoDocuments);
        }
        let needed = HEADER as u128 + 12 * u128::from(sequences) + 8 * u128::from(documents);
        let has_modes = sequences > 0 && found as u128 == needed + u128::from(sequences);
        if found as u128 != needed && !has_modes {
            return Err(MalformedIndex::Size {
                found,
                sequences,
                documents,
                needed,
            });
        }
        // Both numbers are smaller than the number of bytes, so they fit.
        Ok(Self {
            token_type,
            sequences: sequences as usize,
            document_indices: documents as usize,
            has_modes,
        })
    }

    /// Checks that every sequence lies within a .bin file of `bin_bytes` bytes, and that the document indices are in
    /// ascending order. `index` must contain the bytes from which the header was parsed. Returns the total number of
    /// tokens.
    ///
    /// # Errors
    ///
    /// [`MalformedIndex`] with the first invalid sequence or document index.
    pub fn check(&self, index: &[u8], bin_bytes: u64) -> Result<u64, MalformedIndex> {
        let lengths = words(&index[self.lengths()]).map(i32::from_le_bytes);
        let pointers = words(&index[self.pointers()]).map(i64::from_le_bytes);
        let mut tokens = 0;
        for (sequence, (length, pointer)) in lengths.zip(pointers).enumerate() {
            let Ok(count) = u64::try_from(length) else {
                return Err(MalformedIndex::Length { sequence, length });
            };
            // In i128: an `i32` times at most 8 plus an `i64` does not overflow.
            let end = i128::from(pointer) + i128::from(count) * self.token_type.size() as i128;
            if pointer < 0 || end > i128::from(bin_bytes) {
                return Err(MalformedIndex::Pointer {
                    sequence,
                    pointer,
                    length,
                    bin_bytes,
                });
            }
            tokens += count;
        }
        self.check_documents(index)?;
        self.check_modes(index)?;
        Ok(tokens)
    }

    fn check_documents(&self, index: &[u8]) -> Result<(), MalformedIndex> {
        let (sequences, last) = (self.sequences, self.document_indices - 1);
        let mut before = 0;
        let documents = words(&index[self.documents()]).map(i64::from_le_bytes);
        for (number, found) in documents.enumerate() {
            let fits = found >= before
                && found <= sequences as i64
                && (number > 0 || found == 0)
                && (number < last || found == sequences as i64);
            if !fits {
                return Err(MalformedIndex::Documents {
                    number,
                    found,
                    before,
                    sequences,
                });
            }
            before = found;
        }
        Ok(())
    }

    fn check_modes(&self, index: &[u8]) -> Result<(), MalformedIndex> {
        let modes = if self.has_modes {
            &index[self.documents().end..]
        } else {
            &[]
        };
        match modes.iter().position(|mode| *mode != 0) {
            Some(sequence) => Err(MalformedIndex::Mode {
                sequence,
                mode: modes[sequence] as i8,
            }),
            None => Ok(()),
        }
    }

    /// Returns the byte range of the lengths.
    pub(super) fn lengths(&self) -> Range<usize> {
        HEADER..HEADER + 4 * self.sequences
    }

    /// Returns the byte range of the pointers.
    pub(super) fn pointers(&self) -> Range<usize> {
        let start = self.lengths().end;
        start..start + 8 * self.sequences
    }

    /// Returns the byte range of the document indices.
    pub(super) fn documents(&self) -> Range<usize> {
        let start = self.pointers().end;
        start..start + 8 * self.document_indices
    }
}
