//! The documents of a text, in memory.

use std::path::Path;

use super::split::{choose_held_out, hash, split_bytes};
use super::{DOCUMENT_END, DataError};

/// Documents that [`TextData`](super::TextData) and [`TokenizedText`](super::TokenizedText) are made of, in
/// one buffer.
#[derive(Clone, Debug, Default)]
pub struct TextDocuments {
    bytes: Vec<u8>,
    documents: Vec<DocumentEnd>,
    given: usize,
    source: Option<String>,
    all_to_train: bool,
}

/// Where a document ends in the buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct DocumentEnd {
    /// The hash of its key, which orders documents for the split.
    pub(super) hash: u64,
    pub(super) end: usize,
}

impl TextDocuments {
    /// Adds a document. Its key, such as its path, decides whether it is held out, and must differ from those of
    /// others. Empty documents are counted only.
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

    /// Sets what the description of the data says of the source, such as the number of its files.
    pub fn with_source(self, source: impl Into<String>) -> Self {
        Self {
            source: Some(source.into()),
            ..self
        }
    }

    /// Sets that all documents are trained on and nothing is held out.
    pub fn without_held_out(self) -> Self {
        Self {
            all_to_train: true,
            ..self
        }
    }

    /// Whether a part of the text is held out.
    pub(super) fn holds_out(&self) -> bool {
        !self.all_to_train
    }

    /// The number of documents that are not empty.
    pub fn len(&self) -> usize {
        self.documents.len()
    }

    /// Whether no document has text.
    pub fn is_empty(&self) -> bool {
        self.documents.is_empty()
    }

    /// The path and the source, as they begin a description.
    pub(super) fn describe(&self, path: &Path) -> String {
        let source = self.source.as_ref().map(|source| format!(", {source}"));
        format!("{}{}", path.display(), source.unwrap_or_default())
    }

    /// Splits the documents; of a single one the last tenth of its bytes is held out, from a byte for which
    /// `may_begin` is true on.
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

    /// The text of each document.
    fn texts(&self) -> impl Iterator<Item = &[u8]> {
        let mut start = 0;
        self.documents.iter().map(move |document| {
            let text = &self.bytes[start..document.end];
            start = document.end;
            text
        })
    }
}

/// The documents of both parts, none of them empty.
#[derive(Default)]
pub(super) struct SplitDocuments<'a> {
    pub(super) training: Vec<&'a [u8]>,
    pub(super) held_out: Vec<&'a [u8]>,
}

impl SplitDocuments<'_> {
    /// The texts of both parts, with a byte between two documents.
    pub(super) fn joined(&self) -> (Vec<u8>, Vec<u8>) {
        let join = |documents: &[&[u8]]| documents.join(&DOCUMENT_END);
        (join(&self.training), join(&self.held_out))
    }
}
