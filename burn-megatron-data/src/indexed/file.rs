//! Reads token files that are mapped into memory.

use std::fmt;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use xxhash_rust::xxh3::Xxh3;

use super::token_type::{word, words};
use super::{IndexHeader, IndexedDatasetError, TokenType, bin_path, idx_path};
use burn_megatron::regular_file;

/// An open indexed dataset. Several threads can read it concurrently.
pub struct IndexedDataset {
    prefix: PathBuf,
    header: IndexHeader,
    index: Mmap,
    bin: Mmap,
    tokens: u64,
}

impl IndexedDataset {
    /// Opens `PREFIX.bin` and `PREFIX.idx`, and validates the complete index, so that later reads cannot fail because
    /// of an invalid index.
    ///
    /// # Errors
    ///
    /// [`IndexedDatasetError`] with the path of the file and the cause.
    pub fn open(prefix: &Path) -> Result<Self, IndexedDatasetError> {
        let (index, bin) = (map(idx_path(prefix))?, map(bin_path(prefix))?);
        let malformed = |source| IndexedDatasetError::Malformed {
            path: idx_path(prefix),
            source,
        };
        let header = IndexHeader::parse(&index).map_err(malformed)?;
        let tokens = header.check(&index, bin.len() as u64).map_err(malformed)?;
        Ok(Self {
            prefix: prefix.to_path_buf(),
            header,
            index,
            bin,
            tokens,
        })
    }

    /// Returns the path prefix: the path of both files without their extensions.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Returns the type in which tokens are stored.
    pub fn token_type(&self) -> TokenType {
        self.header.token_type
    }

    /// Returns the number of sequences.
    pub fn sequences(&self) -> usize {
        self.header.sequences
    }

    /// Returns the number of documents.
    pub fn documents(&self) -> usize {
        self.header.document_indices - 1
    }

    /// Returns the total number of tokens of all sequences.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the range of the sequences of a document, or `None` if there is no such document.
    pub fn document(&self, number: usize) -> Option<Range<usize>> {
        (number < self.documents()).then(|| {
            let start = self.header.documents().start + 8 * number;
            let at = |start| i64::from_le_bytes(word(&self.index, start)) as usize;
            at(start)..at(start + 8)
        })
    }

    /// Returns the number of tokens of a sequence, or `None` if there is no such sequence.
    pub fn length(&self, sequence: usize) -> Option<usize> {
        let start = self.header.lengths().start + 4 * sequence;
        (sequence < self.sequences()).then(|| i32::from_le_bytes(word(&self.index, start)) as usize)
    }

    /// Returns the lengths of all sequences in order.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = i32> {
        words(&self.index[self.header.lengths()]).map(i32::from_le_bytes)
    }

    /// Returns all tokens of a sequence.
    ///
    /// # Errors
    ///
    /// The errors of [`read`](Self::read).
    pub fn sequence(&self, sequence: usize) -> Result<Vec<i32>, IndexedDatasetError> {
        let length = self.length(sequence).unwrap_or(0);
        self.get(sequence, 0, length)
    }

    /// Returns `length` tokens of a sequence, starting at the token with the index `offset`.
    ///
    /// # Errors
    ///
    /// The errors of [`read`](Self::read).
    pub fn get(
        &self,
        sequence: usize,
        offset: usize,
        length: usize,
    ) -> Result<Vec<i32>, IndexedDatasetError> {
        let mut tokens = vec![];
        self.read(sequence, offset, length, &mut tokens)?;
        Ok(tokens)
    }

    /// Reads `length` tokens of a sequence, starting at the token with the index `offset`, and appends them to
    /// `tokens`.
    ///
    /// # Errors
    ///
    /// [`IndexedDatasetError::NoSuchSequence`] if the sequence does not exist, [`IndexedDatasetError::PastEnd`] if the
    /// range extends beyond the end of the sequence, and [`IndexedDatasetError::BadToken`] for tokens that are negative
    /// or above `i32::MAX`.
    pub fn read(
        &self,
        sequence: usize,
        offset: usize,
        length: usize,
        tokens: &mut Vec<i32>,
    ) -> Result<(), IndexedDatasetError> {
        let Some(all) = self.length(sequence) else {
            return Err(IndexedDatasetError::NoSuchSequence {
                path: bin_path(&self.prefix),
                sequences: self.sequences(),
                sequence,
            });
        };
        if offset.checked_add(length).is_none_or(|end| end > all) {
            return Err(IndexedDatasetError::PastEnd {
                path: bin_path(&self.prefix),
                sequence,
                length: all,
                offset,
                wanted: length,
            });
        }
        let size = self.token_type().size();
        let start = self.pointer(sequence) + offset * size;
        let bytes = &self.bin[start..start + length * size];
        let decoded = self.token_type().decode(bytes, tokens);
        decoded.map_err(|token| IndexedDatasetError::BadToken {
            path: bin_path(&self.prefix),
            sequence,
            token,
        })
    }

    /// Returns the byte offset of a sequence, which [`IndexHeader::check`] validated.
    fn pointer(&self, sequence: usize) -> usize {
        let start = self.header.pointers().start + 8 * sequence;
        i64::from_le_bytes(word(&self.index, start)) as usize
    }

    /// Returns the stored bytes of a sequence.
    pub(super) fn bytes(&self, sequence: usize, length: usize) -> &[u8] {
        let start = self.pointer(sequence);
        &self.bin[start..start + length * self.token_type().size()]
    }

    /// Returns a hash of the dataset. It covers the index, the size of the file of tokens, and 256 evenly spaced blocks
    /// of 4 KiB of this file. If the file has at most 1 MiB, all tokens are hashed.
    pub fn fingerprint(&self) -> u64 {
        const STRETCH: usize = 4096;
        const STRETCHES: usize = 256;
        let mut hash = Xxh3::new();
        hash.update(&self.index);
        hash.update(&(self.bin.len() as u64).to_le_bytes());
        let spread = self.bin.len().saturating_sub(STRETCH);
        if spread > (STRETCHES - 1) * STRETCH {
            (0..STRETCHES).for_each(|number| {
                let start = spread * number / (STRETCHES - 1);
                hash.update(&self.bin[start..start + STRETCH]);
            })
        } else {
            hash.update(&self.bin)
        }
        hash.digest()
    }
}

/// Shows the prefix and the sizes.
impl fmt::Debug for IndexedDataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexedDataset")
            .field("prefix", &self.prefix)
            .field("header", &self.header)
            .field("tokens", &self.tokens)
            .finish()
    }
}

pub(crate) fn map(path: PathBuf) -> Result<Mmap, IndexedDatasetError> {
    let file = match regular_file::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(IndexedDatasetError::Missing(path));
        }
        opened => opened,
    };
    // Safety: token files are written under another name, renamed when they are complete, and not modified afterwards.
    let mapped = file.and_then(|file| unsafe { Mmap::map(&file) });
    mapped.map_err(|source| IndexedDatasetError::Io {
        what: "read",
        path,
        source,
    })
}
