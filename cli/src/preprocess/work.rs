//! The worker threads, which tokenize documents.

use std::sync::mpsc::{Receiver, SyncSender};

use burn_megatron_data::tokenizer::Tokenizer;

use super::error::PreprocessError;
use super::read::{DocumentBatch, StageMessage};
use crate::documents::{BadDocument, DocumentContent};

/// Tokens of the documents of a batch.
#[derive(Default)]
pub struct TokenizedBatch {
    /// The documents for each output, in order.
    pub outputs: Vec<TokenizedDocuments>,
    /// The number of bad documents that were skipped.
    pub bad: u64,
}

/// Documents of a batch for one output.
#[derive(Clone, Default)]
pub struct TokenizedDocuments {
    /// The tokens of each document, and the number of bytes of its text.
    pub documents: Vec<(Vec<u32>, usize)>,
    /// The number of documents without tokens.
    pub empty: u64,
}

/// Settings of a worker. Each worker has its own copy.
#[derive(Clone)]
pub struct TokenizeWorker {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The keys of JSON objects, one per output.
    pub keys: Vec<String>,
    /// The token that is appended to every document, if any.
    pub eod: Option<u32>,
    /// Whether the special tokens of the tokenizer are added to documents.
    pub framed: bool,
    /// Whether bad documents are skipped.
    pub skip_bad: bool,
}

impl TokenizeWorker {
    /// Tokenizes batches until the end, or until the receiver is gone.
    pub fn run(
        &self,
        from: &Receiver<StageMessage<DocumentBatch>>,
        to: &SyncSender<StageMessage<TokenizedBatch>>,
    ) {
        while let Ok(message) = from.recv() {
            let done = match message {
                StageMessage::Batch(batch) => {
                    StageMessage::Batch(batch.and_then(|batch| self.tokens(batch)))
                }
                StageMessage::End => StageMessage::End,
            };
            if to.send(done).is_err() {
                return;
            }
        }
    }

    fn tokens(&self, batch: DocumentBatch) -> Result<TokenizedBatch, PreprocessError> {
        let mut tokens = TokenizedBatch {
            outputs: vec![TokenizedDocuments::default(); self.keys.len()],
            bad: batch.bad,
        };
        for raw in batch.documents {
            match self.document(raw.content) {
                Ok(documents) => {
                    for (output, (document, bytes)) in tokens.outputs.iter_mut().zip(documents) {
                        if document.is_empty() {
                            output.empty += 1
                        } else {
                            output.documents.push((document, bytes))
                        }
                    }
                }
                Err(_) if self.skip_bad => tokens.bad += 1,
                Err(source) => {
                    let place = raw.place;
                    return Err(PreprocessError::Bad { place, source });
                }
            }
        }
        Ok(tokens)
    }

    /// Returns the tokens of a document for each output, and the number of bytes of its text.
    fn document(&self, content: DocumentContent) -> Result<Vec<(Vec<u32>, usize)>, BadDocument> {
        let texts = content.texts(&self.keys)?.into_iter();
        texts.map(|text| self.text(&text)).collect()
    }

    fn text(&self, text: &str) -> Result<(Vec<u32>, usize), BadDocument> {
        if text.is_empty() {
            return Ok((vec![], 0));
        }
        let mut tokens = self.tokenizer.encode_bytes(text.as_bytes(), self.framed)?;
        if !tokens.is_empty() {
            tokens.extend(self.eod);
        }
        Ok((tokens, text.len()))
    }
}
