//! The documents of a text data set, in memory.

use std::path::Path;

use super::split::{choose_held_out, hash, split_bytes};
use super::{DOCUMENT_END, DataError};

/// The documents of a [`TextData`](super::TextData) or [`TokenizedText`](super::TokenizedText), in one buffer.
///
/// ```
/// use burn_megatron_data::{Samples, TextData, TextDocuments};
///
/// let mut documents = TextDocuments::default();
/// documents.push(b"a.txt", "abc".repeat(100).as_bytes());
/// // The last tenth of a single document is held out.
/// let text = TextData::from_documents("memory".as_ref(), documents)?;
/// assert_eq!(text.training_bytes().len() + text.held_out_bytes().len(), 300);
/// let batch = text.samples(8, 42)?.batch(0..2)?;
/// assert_eq!((batch.rows, batch.seq), (2, 8));
/// # Ok::<(), burn_megatron_data::DataError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TextDocuments {
    bytes: Vec<u8>,
    documents: Vec<DocumentEnd>,
    given: usize,
    source: Option<String>,
    all_to_train: bool,
}

/// The end of a document in the buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct DocumentEnd {
    /// The hash of its key, which orders documents for the split.
    pub(super) hash: u64,
    pub(super) end: usize,
}

impl TextDocuments {
    /// Adds a document. Its key, for example its path, must be unique. The hash of the key determines whether the
    /// document is held out. Empty documents are counted but not stored.
    pub fn push(&mut self, key: &[u8], text: &[u8]) {
        self.given += 1;
        if !text.is_empty() {
            self.bytes.extend_from_slice(text);
            self.documents.push(DocumentEnd {
                hash: hash(key),
                end: self.bytes.len(),
            });
        }
    }

    /// Sets the part of the description that describes the source of the data, such as the number of files.
    pub fn with_source(self, source: impl Into<String>) -> Self {
        Self {
            source: Some(source.into()),
            ..self
        }
    }

    /// Uses all documents for training, so that no document is held out.
    pub fn without_held_out(self) -> Self {
        Self {
            all_to_train: true,
            ..self
        }
    }

    /// Returns whether a part of the text is held out.
    pub(super) fn holds_out(&self) -> bool {
        !self.all_to_train
    }

    /// Returns the number of non-empty documents.
    pub fn len(&self) -> usize {
        self.documents.len()
    }

    /// Returns whether all documents are empty, or no documents were added.
    pub fn is_empty(&self) -> bool {
        self.documents.is_empty()
    }

    /// Returns the path and the source, with which a description begins.
    pub(super) fn describe(&self, path: &Path) -> String {
        let source = self.source.as_ref().map(|source| format!(", {source}"));
        format!("{}{}", path.display(), source.unwrap_or_default())
    }

    /// Splits the documents. If there is a single document, the last tenth of its bytes is held out, starting at a byte
    /// for which `may_begin` is true.
    ///
    /// # Errors
    ///
    /// [`DataError::Empty`].
    pub(super) fn split(
        &self,
        path: &Path,
        may_begin: impl Fn(u8) -> bool,
    ) -> Result<SplitDocuments<'_>, DataError> {
        match self.documents[..] {
            [] => Err(DataError::Empty {
                path: path.to_path_buf(),
                documents: self.given,
            }),
            _ if self.all_to_train => Ok(SplitDocuments {
                training: self.texts().collect(),
                held_out: vec![],
            }),
            [_] => {
                let (training, held_out) = split_bytes(&self.bytes, may_begin);
                Ok(SplitDocuments {
                    training: vec![training],
                    held_out: vec![held_out],
                })
            }
            _ => Ok(self.split_by_document()),
        }
    }

    fn split_by_document(&self) -> SplitDocuments<'_> {
        let mut parts = SplitDocuments::default();
        for (text, held_out) in self.texts().zip(choose_held_out(&self.documents)) {
            if held_out {
                parts.held_out.push(text)
            } else {
                parts.training.push(text)
            }
        }
        parts
    }

    /// Returns the text of each document.
    fn texts(&self) -> impl Iterator<Item = &[u8]> {
        let mut start = 0;
        self.documents.iter().map(move |document| {
            let text = &self.bytes[start..document.end];
            start = document.end;
            text
        })
    }
}

/// The documents of both parts, without empty documents.
#[derive(Default)]
pub(super) struct SplitDocuments<'a> {
    pub(super) training: Vec<&'a [u8]>,
    pub(super) held_out: Vec<&'a [u8]>,
}

impl SplitDocuments<'_> {
    /// Returns the texts of both parts, with a separator byte between documents.
    pub(super) fn joined(&self) -> (Vec<u8>, Vec<u8>) {
        let join = |documents: &[&[u8]]| documents.join(&DOCUMENT_END);
        (join(&self.training), join(&self.held_out))
    }
}
