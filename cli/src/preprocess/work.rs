//! The threads in the middle: make tokens of documents.

use std::sync::mpsc::{Receiver, SyncSender};

use burn_megatron::tokenizer::Tokenizer;

use super::error::{BadDocument, PreprocessError};
use super::object::texts;
use super::read::{Batch, Message, Raw};

/// The tokens of the documents of a batch.
#[derive(Default)]
pub struct Tokens {
    /// For each output, in order.
    pub outputs: Vec<Documents>,
    /// Bad documents that were left out.
    pub bad: u64,
}

/// What one output gets of a batch.
#[derive(Clone, Default)]
pub struct Documents {
    /// The tokens of each document, and its bytes as text.
    pub documents: Vec<(Vec<u32>, usize)>,
    /// Documents without a token.
    pub empty: u64,
}

/// What a worker does to a text; each has its own.
#[derive(Clone)]
pub struct Worker {
    /// Makes the tokens.
    pub tokenizer: Tokenizer,
    /// The keys of JSON objects, one for each output.
    pub keys: Vec<String>,
    /// What ends every document.
    pub eod: Option<u32>,
    /// Whether documents are framed by special tokens.
    pub framed: bool,
    /// Whether bad documents are left out.
    pub skip_bad: bool,
}

impl Worker {
    /// Makes tokens of what comes, until the end or until nobody takes them.
    pub fn run(&self, from: &Receiver<Message<Batch>>, to: &SyncSender<Message<Tokens>>) {
        while let Ok(message) = from.recv() {
            let done = match message {
                Message::Batch(batch) => Message::Batch(batch.and_then(|batch| self.tokens(batch))),
                Message::End => Message::End,
            };
            if to.send(done).is_err() {
                return;
            }
        }
    }

    fn tokens(&self, batch: Batch) -> Result<Tokens, PreprocessError> {
        let mut tokens = Tokens {
            outputs: vec![Documents::default(); self.keys.len()],
            bad: batch.bad,
        };
        for raw in batch.documents {
            match self.document(&raw) {
                Ok(documents) => {
                    for (output, (document, bytes)) in tokens.outputs.iter_mut().zip(documents) {
                        match document.is_empty() {
                            true => output.empty += 1,
                            false => output.documents.push((document, bytes)),
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

    /// The tokens of a document for each output, and its bytes as text.
    fn document(&self, raw: &Raw) -> Result<Vec<(Vec<u32>, usize)>, BadDocument> {
        match (raw.json, raw.bytes.trim_ascii().is_empty()) {
            (true, false) => {
                let texts = texts(&raw.bytes, &self.keys)?.into_iter();
                texts.map(|text| self.text(text.as_bytes())).collect()
            }
            // An empty line is nobody's mistake.
            (true, true) => Ok(vec![(vec![], 0); self.keys.len()]),
            (false, _) => Ok(vec![self.text(&raw.bytes)?]),
        }
    }

    fn text(&self, text: &[u8]) -> Result<(Vec<u32>, usize), BadDocument> {
        if text.is_empty() {
            return Ok((vec![], 0));
        }
        let mut tokens = self.tokenizer.encode_bytes(text, self.framed)?;
        if !tokens.is_empty() {
            tokens.extend(self.eod);
        }
        Ok((tokens, text.len()))
    }
}
