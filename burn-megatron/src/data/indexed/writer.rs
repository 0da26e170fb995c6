//! Token files, written so that there is never half a file under the final name.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::exchange::{Exchange, restore};
use super::header::{MAGIC, VERSION};
use super::{IndexedError, IndexedFile, TokenType, bin_path, idx_path};
use crate::partial::Partial;

/// Writes token files. Tokens go to disk as they come; of each sequence 4 bytes stay in memory, and of each
/// document 8.
///
/// Both files have temporary names beside the final ones until [`finish`](Self::finish). A writer that is
/// dropped before takes them away; what a killed process has left goes when the same files are begun again.
pub struct IndexedWriter {
    prefix: PathBuf,
    replace: bool,
    token_type: TokenType,
    bin: BufWriter<File>,
    partial: Partial,
    lengths: Vec<i32>,
    documents: Vec<i64>,
    tokens: u64,
    /// The bytes of one sequence.
    bytes: Vec<u8>,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The number of sequences.
    pub sequences: usize,
    /// The number of documents.
    pub documents: usize,
    /// The number of tokens.
    pub tokens: u64,
}

impl IndexedWriter {
    /// Begins files that are not there yet.
    ///
    /// # Errors
    ///
    /// [`IndexedError::Exists`], [`IndexedError::Io`].
    pub fn create(prefix: &Path, token_type: TokenType) -> Result<Self, IndexedError> {
        restore(prefix).map_err(|source| write_error(prefix, source))?;
        refuse_existing(prefix)?;
        Self::begin(prefix, token_type, false)
    }

    /// Begins files that take the place of those that are there, once they are finished: all of them or none.
    ///
    /// # Errors
    ///
    /// [`IndexedError::Io`].
    pub fn replace(prefix: &Path, token_type: TokenType) -> Result<Self, IndexedError> {
        restore(prefix).map_err(|source| write_error(prefix, source))?;
        Self::begin(prefix, token_type, true)
    }

    fn begin(prefix: &Path, token_type: TokenType, replace: bool) -> Result<Self, IndexedError> {
        let (partial, bin) = begin(&bin_path(prefix))?;
        Ok(Self {
            prefix: prefix.to_path_buf(),
            replace,
            token_type,
            bin: BufWriter::with_capacity(1 << 20, bin),
            partial,
            lengths: vec![],
            documents: vec![0],
            tokens: 0,
            bytes: vec![],
        })
    }

    /// A document of one sequence.
    ///
    /// # Errors
    ///
    /// See [`sequence`](Self::sequence).
    pub fn document(&mut self, tokens: &[u32]) -> Result<(), IndexedError> {
        self.sequence(tokens)?;
        self.end_document();
        Ok(())
    }

    /// One more sequence of a document, which ends with [`end_document`](Self::end_document).
    ///
    /// # Errors
    ///
    /// [`IndexedError::TokenTooLarge`], [`IndexedError::SequenceTooLong`], [`IndexedError::Io`].
    pub fn sequence(&mut self, tokens: &[u32]) -> Result<(), IndexedError> {
        let max = self.token_type.max();
        if let Some(&token) = tokens.iter().find(|token| u64::from(**token) > max) {
            let path = bin_path(&self.prefix);
            return Err(IndexedError::TokenTooLarge { path, token, max });
        }
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        self.token_type.encode(tokens, &mut bytes);
        let written = self.raw(&bytes, tokens.len());
        self.bytes = bytes;
        written
    }

    /// The document ends after the sequences that it has by now, which may be none.
    pub fn end_document(&mut self) {
        self.documents.push(self.lengths.len() as i64);
    }

    /// All documents of other files.
    ///
    /// # Errors
    ///
    /// [`IndexedError::OtherType`], [`IndexedError::OpenDocument`] if one is open, [`IndexedError::Io`].
    pub fn append(&mut self, file: &IndexedFile) -> Result<(), IndexedError> {
        if file.token_type() != self.token_type {
            return Err(IndexedError::OtherType {
                path: bin_path(file.prefix()),
                found: file.token_type(),
                wanted: self.token_type,
            });
        }
        self.refuse_open_document()?;
        for document in (0..file.documents()).filter_map(|number| file.document(number)) {
            for sequence in document {
                let length = file.length(sequence).unwrap_or(0);
                self.raw(file.bytes(sequence, length), length)?;
            }
            self.end_document();
        }
        Ok(())
    }

    /// Writes the index, waits until all is on disk, and gives both files their names, the index last.
    ///
    /// # Errors
    ///
    /// [`IndexedError::OpenDocument`], [`IndexedError::Exists`] if files came under the final name meanwhile,
    /// [`IndexedError::Io`].
    pub fn finish(self) -> Result<Written, IndexedError> {
        self.finish_with(None)
    }

    /// [`finish`](Self::finish) with a file that says what is in the others: it takes the place of the old one
    /// when they do.
    ///
    /// # Errors
    ///
    /// Those of [`finish`](Self::finish).
    pub fn finish_beside(self, path: &Path, bytes: &[u8]) -> Result<Written, IndexedError> {
        let (about, mut file) = begin(path)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(|source| write_error(about.path(), source))?;
        self.finish_with(Some((about, path.to_path_buf())))
    }

    fn finish_with(mut self, about: Option<(Partial, PathBuf)>) -> Result<Written, IndexedError> {
        self.refuse_open_document()?;
        let flushed = self.bin.flush();
        let flushed = flushed.and_then(|()| self.bin.get_ref().sync_all());
        flushed.map_err(|source| write_error(self.partial.path(), source))?;
        let (idx, file) = begin(&idx_path(&self.prefix))?;
        let written = self.write_index(file);
        written.map_err(|source| write_error(idx.path(), source))?;
        let written = Written {
            sequences: self.lengths.len(),
            documents: self.documents.len() - 1,
            tokens: self.tokens,
        };
        if !self.replace {
            refuse_existing(&self.prefix)?;
        }
        let bin = Some((self.partial, bin_path(&self.prefix)));
        let files = [bin, about, Some((idx, idx_path(&self.prefix)))];
        let exchanged = Exchange::run(files.into_iter().flatten().collect());
        exchanged.map_err(|(path, source)| write_error(&path, source))?;
        Ok(written)
    }

    fn raw(&mut self, bytes: &[u8], tokens: usize) -> Result<(), IndexedError> {
        let Ok(length) = i32::try_from(tokens) else {
            let path = bin_path(&self.prefix);
            return Err(IndexedError::SequenceTooLong { path, tokens });
        };
        let written = self.bin.write_all(bytes);
        written.map_err(|source| write_error(self.partial.path(), source))?;
        self.lengths.push(length);
        self.tokens += tokens as u64;
        Ok(())
    }

    fn refuse_open_document(&self) -> Result<(), IndexedError> {
        let ended = self.documents.last().copied().unwrap_or(0) as usize;
        match self.lengths.len() - ended {
            0 => Ok(()),
            sequences => Err(IndexedError::OpenDocument {
                path: bin_path(&self.prefix),
                sequences,
            }),
        }
    }

    fn write_index(&self, file: File) -> io::Result<()> {
        let mut to = BufWriter::with_capacity(1 << 20, file);
        to.write_all(&MAGIC)?;
        to.write_all(&VERSION.to_le_bytes())?;
        to.write_all(&[self.token_type.code()])?;
        for count in [self.lengths.len(), self.documents.len()] {
            to.write_all(&(count as u64).to_le_bytes())?;
        }
        for length in &self.lengths {
            to.write_all(&length.to_le_bytes())?;
        }
        let mut pointer = 0_i64;
        for length in &self.lengths {
            to.write_all(&pointer.to_le_bytes())?;
            pointer += i64::from(*length) * self.token_type.size() as i64;
        }
        for document in &self.documents {
            to.write_all(&document.to_le_bytes())?;
        }
        to.flush()?;
        to.get_ref().sync_all()
    }
}

fn refuse_existing(prefix: &Path) -> Result<(), IndexedError> {
    let paths = [bin_path(prefix), idx_path(prefix)];
    match paths.into_iter().find(|path| path.exists()) {
        Some(path) => Err(IndexedError::Exists(path)),
        None => Ok(()),
    }
}

fn begin(path: &Path) -> Result<(Partial, File), IndexedError> {
    Partial::file(path).map_err(|source| write_error(path, source))
}

fn write_error(path: &Path, source: io::Error) -> IndexedError {
    IndexedError::Io {
        what: "write",
        path: path.to_path_buf(),
        source,
    }
}
