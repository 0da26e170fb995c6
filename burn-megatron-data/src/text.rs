//! A byte-level text, split into a training part and a held-out part.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs};

use indicatif::HumanCount;

use super::files::{read_file, read_folder};
use super::{
    DOCUMENT_END, DataError, Dataset, Sample, Samples, Sampling, TextDocuments, TextPart,
    TextSamples, VOCABULARY,
};

/// The extensions of the files that [`TextData::open`] reads in a folder.
pub const EXTENSIONS: [&str; 3] = ["rs", "md", "txt"];

/// A byte-level text in memory. Each byte is a token.
///
/// Clones share the bytes, so every rank of a process can hold a clone.
#[derive(Clone)]
pub struct TextData {
    path: PathBuf,
    /// The beginning of the description.
    source: String,
    training: Arc<[u8]>,
    held_out: Arc<[u8]>,
    reset_attention: bool,
    holds_out: bool,
}

impl TextData {
    /// Reads a text. `path` is a file with any name, or a folder. In a folder and its subfolders, all files with one of
    /// [`EXTENSIONS`] are read.
    ///
    /// Hidden files and folders, symbolic links, and folders named `target`, `node_modules` or `runs` below `path` are
    /// skipped. Empty files are ignored. Files are joined in the order of their relative paths, separated by one
    /// [`DOCUMENT_END`].
    ///
    /// About a tenth of the bytes is held out. Complete files are held out, which are selected by a hash of their
    /// relative paths. Each part has at least one file. If there is a single file, the last tenth of its bytes is held
    /// out. The split depends only on relative paths and file sizes.
    ///
    /// # Errors
    ///
    /// [`DataError::Missing`], [`DataError::Unreadable`], [`DataError::NotText`], [`DataError::Empty`] or
    /// [`DataError::NoMatchingFiles`] if the text cannot be read. This function does not check the length of the text:
    /// see [`TextData::samples`].
    pub fn open(path: &Path) -> Result<Self, DataError> {
        Self::open_with(path, &EXTENSIONS)
    }

    /// Reads a text like [`TextData::open`], with other extensions. Extensions are given without the dot, in upper or
    /// lower case.
    ///
    /// # Errors
    ///
    /// The errors of [`TextData::open`].
    pub fn open_with(path: &Path, extensions: &[&str]) -> Result<Self, DataError> {
        Self::from_documents(path, read_documents(path, extensions)?)
    }

    /// Creates a text from documents. The documents are split and joined as in [`TextData::open`]. `path` is the path
    /// from which they were read, which appears in descriptions and errors.
    ///
    /// # Errors
    ///
    /// [`DataError::Empty`] if no document has text.
    pub fn from_documents(path: &Path, documents: TextDocuments) -> Result<Self, DataError> {
        let (training, held_out) = documents.split(path, |_| true)?.joined();
        let (source, holds_out) = (documents.describe(path), documents.holds_out());
        // Frees the documents before the texts are copied once more.
        drop(documents);
        Ok(Self {
            path: path.to_path_buf(),
            source,
            training: training.into(),
            held_out: held_out.into(),
            reset_attention: false,
            holds_out,
        })
    }

    /// Sets whether a token only attends to tokens of its own document (a file of the folder). If true, positions also
    /// restart at 0 in each document.
    pub fn with_reset_attention(self, reset_attention: bool) -> Self {
        Self {
            reset_attention,
            ..self
        }
    }

    /// Returns the bytes of the training text, from which windows are sampled.
    pub fn training_bytes(&self) -> &[u8] {
        &self.training
    }

    /// Returns the bytes of the held-out text.
    pub fn held_out_bytes(&self) -> &[u8] {
        &self.held_out
    }

    /// Returns the training samples of the text: windows of `seq` tokens that are sampled with the seed `seed`.
    ///
    /// # Errors
    ///
    /// [`DataError::ZeroLength`] if `seq` is 0; [`DataError::TooShort`] if the training text has fewer than `seq + 1`
    /// bytes.
    pub fn samples(&self, seq: usize, seed: u64) -> Result<TextSamples, DataError> {
        self.check_length(TextPart::Training, seq)?;
        let text = Arc::clone(&self.training);
        Ok(TextSamples::new(text, seq, seed).with_documents(self.reset_attention))
    }

    fn check_length(&self, part: TextPart, seq: usize) -> Result<(), DataError> {
        let bytes = match part {
            TextPart::Training => self.training.len(),
            TextPart::HeldOut => self.held_out.len(),
        };
        if seq == 0 {
            return Err(DataError::ZeroLength);
        }
        if bytes <= seq {
            let (path, needed) = (self.path.clone(), seq.saturating_add(1));
            return Err(DataError::TooShort {
                path,
                part,
                bytes,
                seq,
                needed,
            });
        }
        Ok(())
    }
}

/// Reads a file or a folder; see [`TextData::open`].
pub(super) fn read_documents(path: &Path, extensions: &[&str]) -> Result<TextDocuments, DataError> {
    let kind = fs::metadata(path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => DataError::Missing {
            path: path.to_path_buf(),
        },
        _ => DataError::Unreadable {
            path: path.to_path_buf(),
            source,
        },
    })?;
    if kind.is_file() {
        let mut documents = TextDocuments::default();
        documents.push(b"", &read_file(path)?);
        Ok(documents)
    } else if kind.is_dir() {
        read_folder(path, extensions)?.ok_or_else(|| {
            let extensions: Vec<String> = extensions.iter().map(|e| format!(".{e}")).collect();
            DataError::NoMatchingFiles {
                path: path.to_path_buf(),
                extensions: extensions.join(", "),
            }
        })
    } else {
        Err(DataError::NotText {
            path: path.to_path_buf(),
        })
    }
}

impl Dataset for TextData {
    fn describe(&self) -> String {
        format!(
            "{}: {} bytes to train on, {} held out",
            self.source,
            HumanCount(self.training.len() as u64),
            HumanCount(self.held_out.len() as u64),
        )
    }

    /// Returns the 64-bit FNV-1a hash of the bytes. The hash detects accidental differences, but not malicious changes.
    fn fingerprint(&self) -> u64 {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let bytes = self.training.iter().chain(self.held_out.iter());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325, step);
        hash ^ (self.training.len() as u64).rotate_left(32)
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn training(&self, sampling: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(self.samples(sampling.seq, sampling.seed)?))
    }

    /// Cuts the held-out text into consecutive windows, so that no byte is a target twice. The rest at the end is not
    /// used. If there are more than `max` windows, evenly spaced windows are selected: window number
    /// `floor(i * windows / max)` for each `i` below `max`. The selection depends only on the text, `seq` and `max`, so
    /// the losses of different runs are comparable. Returns no window if `max` is 0 or if nothing is held out.
    fn held_out(&self, seq: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        if max == 0 || !self.holds_out {
            return Ok(vec![]);
        }
        self.check_length(TextPart::HeldOut, seq)?;
        let mut windows = windows(&self.held_out, seq, max);
        if self.reset_attention {
            windows.iter_mut().for_each(split_at_documents);
        }
        Ok(windows)
    }
}

/// Records the starts of the documents in a window of bytes. The end byte of a document belongs to the document.
pub(super) fn split_at_documents(sample: &mut Sample) {
    let ends = sample.tokens.iter().enumerate();
    let ends = ends.filter(|(_, token)| **token == i32::from(DOCUMENT_END));
    let after = ends.map(|(end, _)| end as i32 + 1);
    let starts = std::iter::once(0).chain(after);
    let length = sample.tokens.len() as i32;
    sample.documents = starts
        .filter(|start| *start < length)
        .map(|start| start as _)
        .collect();
}

/// Returns at most `max` windows of a text, which must have more than `seq` tokens. Windows are cut from the start, and
/// evenly spaced if there are more.
pub(super) fn windows<T: Copy + Into<i32>>(text: &[T], seq: usize, max: usize) -> Vec<Sample> {
    // The last target of a window is the first token of the next one.
    let windows = (text.len() - 1) / seq;
    let taken = windows.min(max);
    (0..taken)
        .map(|i| window(text, i * windows / taken * seq, seq))
        .collect()
}

/// Returns the window at `start`. The text must have more than `start + seq` tokens.
pub(super) fn window<T: Copy + Into<i32>>(text: &[T], start: usize, seq: usize) -> Sample {
    let tokens = |start: usize| text[start..start + seq].iter().map(|token| (*token).into());
    Sample {
        tokens: tokens(start).collect(),
        targets: tokens(start + 1).collect(),
        documents: vec![],
        padding: 0,
    }
}

/// Shows the path and the sizes, not the text.
impl fmt::Debug for TextData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextData")
            .field("path", &self.path)
            .field("training_bytes", &self.training.len())
            .field("held_out_bytes", &self.held_out.len())
            .finish()
    }
}
