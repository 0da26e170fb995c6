//! The reader thread, which splits the inputs into batches of documents.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use super::error::PreprocessError;
use crate::documents::{
    BadDocument, DocumentContent, DocumentPosition, Input, InputError, NextDocument,
};

/// The number of bytes at which a batch is sent. A longer document is sent as a separate batch. The number is small
/// in tests, so that a short text gives several batches.
const BATCH: usize = if cfg!(test) { 1 << 14 } else { 1 << 20 };

/// The number of bytes that a document needs in addition to its text.
const OVERHEAD: usize = 64;

/// Document as stored in its file.
pub struct RawDocument {
    /// The content.
    pub content: DocumentContent,
    /// The position.
    pub place: DocumentPosition,
}

/// Documents that are sent to a worker together.
#[derive(Default)]
pub struct DocumentBatch {
    /// The documents, in order.
    pub documents: Vec<RawDocument>,
    /// The number of bad documents that were skipped.
    pub bad: u64,
    size: usize,
}

/// Message from a thread to the next thread. The end is a separate message, so that it differs from the death of a
/// thread.
pub enum StageMessage<T> {
    /// A batch, or an error.
    Batch(Result<T, PreprocessError>),
    /// There are no more batches.
    End,
}

/// Reader of the inputs.
pub struct InputReader {
    /// The inputs.
    pub inputs: Vec<Input>,
    /// The keys of the texts of records.
    pub keys: Vec<String>,
    /// Maximum size of a document in bytes.
    pub limit: usize,
    /// Whether bad documents are skipped.
    pub skip_bad: bool,
    /// The number of bytes that were read, as stored on disk.
    pub read: Arc<AtomicU64>,
    /// Whether to stop.
    pub stop: Arc<AtomicBool>,
}

impl InputReader {
    /// Sends the batches to the workers in turn. Returns early if a worker is gone.
    pub fn run(&self, workers: &[SyncSender<StageMessage<DocumentBatch>>]) {
        let mut turn = workers.iter().cycle();
        let mut send = |message| {
            turn.next()
                .is_some_and(|worker| worker.send(message).is_ok())
        };
        let mut batch = DocumentBatch::default();
        for input in &self.inputs {
            match self.read(input, &mut batch, &mut |batch| {
                send(StageMessage::Batch(Ok(batch)))
            }) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    // Earlier batches are sent first, because they may contain other errors.
                    if send(StageMessage::Batch(Ok(batch))) {
                        send(StageMessage::Batch(Err(error)));
                    }
                    return;
                }
            }
        }
        if send(StageMessage::Batch(Ok(batch))) {
            send(StageMessage::End);
        }
    }

    /// Reads one input. Returns false if the receivers are gone or the run is stopped.
    fn read(
        &self,
        input: &Input,
        batch: &mut DocumentBatch,
        send: &mut impl FnMut(DocumentBatch) -> bool,
    ) -> Result<bool, PreprocessError> {
        let name = input.name();
        let failed = |source| InputError::Io {
            action: "read",
            path: name.to_string(),
            source,
        };
        let mut documents = input.open(&self.keys, self.limit, &self.read)?;
        for number in 1.. {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let place = || DocumentPosition {
                file: Arc::clone(&name),
                number,
                unit: input.format.unit(),
            };
            match documents.next().map_err(failed)? {
                NextDocument::Document(content) => {
                    batch.size += content.bytes() + OVERHEAD;
                    let place = place();
                    batch.documents.push(RawDocument { content, place });
                }
                NextDocument::TooLong if self.skip_bad => batch.bad += 1,
                NextDocument::TooLong => {
                    return Err(PreprocessError::Bad {
                        place: place(),
                        source: BadDocument::TooLong(self.limit),
                    });
                }
                NextDocument::End => break,
            }
            if batch.size >= BATCH && !send(std::mem::take(batch)) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
