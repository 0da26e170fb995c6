//! Token files, written so that there is never half a file under the final name.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

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
        refuse_existing(prefix)?;
        Self::begin(prefix, token_type, false)
    }

    /// Begins files that take the place of those that are there, once they are finished.
    ///
    /// # Errors
    ///
    /// [`IndexedError::Io`].
    pub fn replace(prefix: &Path, token_type: TokenType) -> Result<Self, IndexedError> {
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
    pub fn finish(mut self) -> Result<Written, IndexedError> {
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
        self.publish(idx)?;
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

    fn publish(self, index: Partial) -> Result<(), IndexedError> {
        let (bin, idx) = (bin_path(&self.prefix), idx_path(&self.prefix));
        match self.replace {
            // Without an index, so that nobody reads new tokens by an old one.
            true => match fs::remove_file(&idx) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(write_error(&idx, error));
                }
                _ => {}
            },
            false => refuse_existing(&self.prefix)?,
        }
        let published = self.partial.publish();
        published.map_err(|source| write_error(&bin, source))?;
        if let Err(source) = index.publish() {
            // Tokens without an index are of no use; what matters is the first error.
            let _ = fs::remove_file(&bin);
            return Err(write_error(&idx, source));
        }
        sync_folder(&idx).map_err(|source| write_error(&idx, source))
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

/// Waits until the names in the folder of a file are on disk.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    match cfg!(unix) {
        true => File::open(folder)?.sync_all(),
        false => Ok(()),
    }
}

fn write_error(path: &Path, source: io::Error) -> IndexedError {
    IndexedError::Io {
        what: "write",
        path: path.to_path_buf(),
        source,
    }
}
