//! Writes token files. The files get their final names when they are complete.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::header::{MAGIC, VERSION};
use super::replacement::{FileReplacement, restore};
use super::{IndexedDataset, IndexedDatasetError, TokenType, bin_path, idx_path};
use burn_megatron::atomic_file::StagedPath;

/// The writer of an indexed dataset. Tokens are streamed to disk. 4 bytes per sequence and 8 bytes per document are
/// kept in memory.
///
/// Both files have temporary names until [`finish`](Self::finish) is called. If the builder is dropped without
/// `finish`, the temporary files are removed. Temporary files of a killed process are removed when the same files are
/// created again.
pub struct IndexedDatasetBuilder {
    prefix: PathBuf,
    replace: bool,
    token_type: TokenType,
    bin: BufWriter<File>,
    partial: StagedPath,
    lengths: Vec<i32>,
    documents: Vec<i64>,
    tokens: u64,
    /// The buffer of the encoded sequence.
    bytes: Vec<u8>,
}

/// The numbers of sequences, documents and tokens that were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteSummary {
    /// The number of sequences.
    pub sequences: usize,
    /// The number of documents.
    pub documents: usize,
    /// The number of tokens.
    pub tokens: u64,
}

impl IndexedDatasetBuilder {
    /// Creates the files of a new dataset.
    ///
    /// # Errors
    ///
    /// [`IndexedDatasetError::Exists`] if the files already exist; [`IndexedDatasetError::Io`] if they cannot be
    /// created.
    pub fn create(prefix: &Path, token_type: TokenType) -> Result<Self, IndexedDatasetError> {
        restore(prefix).map_err(|source| write_error(prefix, source))?;
        refuse_existing(prefix)?;
        Self::begin(prefix, token_type, false)
    }

    /// Creates new files that replace the existing files of a dataset when they are finished. Either all files are
    /// replaced or none.
    ///
    /// # Errors
    ///
    /// [`IndexedDatasetError::Io`] if the files cannot be created.
    pub fn replace(prefix: &Path, token_type: TokenType) -> Result<Self, IndexedDatasetError> {
        restore(prefix).map_err(|source| write_error(prefix, source))?;
        Self::begin(prefix, token_type, true)
    }

    fn begin(
        prefix: &Path,
        token_type: TokenType,
        replace: bool,
    ) -> Result<Self, IndexedDatasetError> {
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

    /// Adds a document that consists of one sequence.
    ///
    /// # Errors
    ///
    /// The errors of [`sequence`](Self::sequence).
    pub fn document(&mut self, tokens: &[u32]) -> Result<(), IndexedDatasetError> {
        self.sequence(tokens)?;
        self.end_document();
        Ok(())
    }

    /// Adds a sequence to the current document. Call [`end_document`](Self::end_document) after the last sequence of
    /// the document.
    ///
    /// # Errors
    ///
    /// [`IndexedDatasetError::TokenTooLarge`] if a token is too large for the token type;
    /// [`IndexedDatasetError::SequenceTooLong`] if the sequence is too long; [`IndexedDatasetError::Io`] if the file
    /// cannot be written.
    pub fn sequence(&mut self, tokens: &[u32]) -> Result<(), IndexedDatasetError> {
        let max = self.token_type.max();
        if let Some(&token) = tokens.iter().find(|token| u64::from(**token) > max) {
            let path = bin_path(&self.prefix);
            return Err(IndexedDatasetError::TokenTooLarge { path, token, max });
        }
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        self.token_type.encode(tokens, &mut bytes);
        let written = self.raw(&bytes, tokens.len());
        self.bytes = bytes;
        written
    }

    /// Ends the current document, which may be empty.
    pub fn end_document(&mut self) {
        self.documents.push(self.lengths.len() as i64);
    }

    /// Appends all documents of another dataset.
    ///
    /// # Errors
    ///
    /// [`IndexedDatasetError::OtherType`] if the token types differ; [`IndexedDatasetError::OpenDocument`] if the
    /// current document has not been ended; [`IndexedDatasetError::Io`] if the file cannot be written.
    pub fn append(&mut self, file: &IndexedDataset) -> Result<(), IndexedDatasetError> {
        if file.token_type() != self.token_type {
            return Err(IndexedDatasetError::OtherType {
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

    /// Writes the index file, syncs both files to disk, and renames them to their final names. The index file is
    /// renamed last.
    ///
    /// # Errors
    ///
    /// [`IndexedDatasetError::OpenDocument`] if the last document has not been ended; [`IndexedDatasetError::Exists`]
    /// if another process has created the files in the meantime; [`IndexedDatasetError::Io`] if the files cannot be
    /// written.
    pub fn finish(self) -> Result<WriteSummary, IndexedDatasetError> {
        self.finish_with(None)
    }

    /// Finishes the files like [`finish`](Self::finish), together with a sidecar file at `path`.
    ///
    /// # Errors
    ///
    /// The errors of [`finish`](Self::finish).
    pub fn finish_beside(
        self,
        path: &Path,
        bytes: &[u8],
    ) -> Result<WriteSummary, IndexedDatasetError> {
        let (sidecar, mut file) = begin(path)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(|source| write_error(sidecar.path(), source))?;
        self.finish_with(Some((sidecar, path.to_path_buf())))
    }

    fn finish_with(
        mut self,
        sidecar: Option<(StagedPath, PathBuf)>,
    ) -> Result<WriteSummary, IndexedDatasetError> {
        self.refuse_open_document()?;
        let flushed = self
            .bin
            .flush()
            .and_then(|()| self.bin.get_ref().sync_all());
        flushed.map_err(|source| write_error(self.partial.path(), source))?;
        let (idx, file) = begin(&idx_path(&self.prefix))?;
        let written = self.write_index(file);
        written.map_err(|source| write_error(idx.path(), source))?;
        let written = WriteSummary {
            sequences: self.lengths.len(),
            documents: self.documents.len() - 1,
            tokens: self.tokens,
        };
        if !self.replace {
            refuse_existing(&self.prefix)?;
        }
        let bin = Some((self.partial, bin_path(&self.prefix)));
        let files = [bin, sidecar, Some((idx, idx_path(&self.prefix)))];
        let replaced = FileReplacement::run(files.into_iter().flatten().collect());
        replaced.map_err(|(path, source)| write_error(&path, source))?;
        Ok(written)
    }

    fn raw(&mut self, bytes: &[u8], tokens: usize) -> Result<(), IndexedDatasetError> {
        let Ok(length) = i32::try_from(tokens) else {
            let path = bin_path(&self.prefix);
            return Err(IndexedDatasetError::SequenceTooLong { path, tokens });
        };
        let written = self.bin.write_all(bytes);
        written.map_err(|source| write_error(self.partial.path(), source))?;
        self.lengths.push(length);
        self.tokens += tokens as u64;
        Ok(())
    }

    fn refuse_open_document(&self) -> Result<(), IndexedDatasetError> {
        let ended = self.documents.last().copied().unwrap_or(0) as usize;
        match self.lengths.len() - ended {
            0 => Ok(()),
            sequences => Err(IndexedDatasetError::OpenDocument {
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

fn refuse_existing(prefix: &Path) -> Result<(), IndexedDatasetError> {
    let paths = [bin_path(prefix), idx_path(prefix)];
    match paths.into_iter().find(|path| path.exists()) {
        Some(path) => Err(IndexedDatasetError::Exists(path)),
        None => Ok(()),
    }
}

fn begin(path: &Path) -> Result<(StagedPath, File), IndexedDatasetError> {
    StagedPath::file(path).map_err(|source| write_error(path, source))
}

fn write_error(path: &Path, source: io::Error) -> IndexedDatasetError {
    IndexedDatasetError::Io {
        what: "write",
        path: path.to_path_buf(),
        source,
    }
}
