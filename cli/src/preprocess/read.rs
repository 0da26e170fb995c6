//! The first of the threads: cuts the inputs into batches of documents.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use super::documents::{Documents, Next};
use super::error::{BadDocument, Place, PreprocessError};
use super::input::{Input, Layout};

/// Bytes at which a batch is handed on; a document that is longer is one of its own. Tests have several
/// batches of little text.
const BATCH: usize = if cfg!(test) { 1 << 14 } else { 1 << 20 };

/// What a document takes besides its bytes.
const OVERHEAD: usize = 64;

/// A document as it lies in its file.
pub struct Raw {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Whether it is a JSON object.
    pub json: bool,
    /// Where it stands.
    pub place: Place,
}

/// Documents that one worker gets at once.
#[derive(Default)]
pub struct Batch {
    /// In their order.
    pub documents: Vec<Raw>,
    /// Bad ones that are left out.
    pub bad: u64,
    size: usize,
}

/// What a thread hands to the next one. An end is said, so that a thread that is gone is no end.
pub enum Message<T> {
    /// One batch, or why there is none.
    Batch(Result<T, PreprocessError>),
    /// There are no more.
    End,
}

/// Reads the inputs.
pub struct Reader {
    /// What is read.
    pub inputs: Vec<Input>,
    /// Bytes that a document may have.
    pub limit: usize,
    /// Whether bad documents are left out.
    pub skip_bad: bool,
    /// Bytes that were read, as they lie on disk.
    pub read: Arc<AtomicU64>,
    /// Whether to stop.
    pub stop: Arc<AtomicBool>,
}

impl Reader {
    /// Hands the batches to the workers in turn; ends early where one of them has.
    pub fn run(&self, workers: &[SyncSender<Message<Batch>>]) {
        let mut turn = workers.iter().cycle();
        let mut send = |message| {
            turn.next()
                .is_some_and(|worker| worker.send(message).is_ok())
        };
        let mut batch = Batch::default();
        for input in &self.inputs {
            match self.read(input, &mut batch, &mut |batch| {
                send(Message::Batch(Ok(batch)))
            }) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    // What was read before comes first: its own errors may.
                    if send(Message::Batch(Ok(batch))) {
                        send(Message::Batch(Err(error)));
                    }
                    return;
                }
            }
        }
        if send(Message::Batch(Ok(batch))) {
            send(Message::End);
        }
    }

    /// Reads one input; false where nobody wants more.
    fn read(
        &self,
        input: &Input,
        batch: &mut Batch,
        send: &mut impl FnMut(Batch) -> bool,
    ) -> Result<bool, PreprocessError> {
        let name = input.name();
        let failed = |source| PreprocessError::Io {
            action: "read",
            path: name.to_string(),
            source,
        };
        let from = input.open(&self.read).map_err(failed)?;
        let mut documents = Documents::new(from, &input.layout, self.limit);
        for number in 1.. {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let place = || Place {
                file: Arc::clone(&name),
                number,
                unit: input.layout.unit(),
            };
            match documents.next().map_err(failed)? {
                Next::Document(bytes) => {
                    batch.size += bytes.len() + OVERHEAD;
                    batch.documents.push(Raw {
                        bytes,
                        json: input.layout == Layout::Json,
                        place: place(),
                    });
                }
                Next::TooLong if self.skip_bad => batch.bad += 1,
                Next::TooLong => {
                    return Err(PreprocessError::Bad {
                        place: place(),
                        source: BadDocument::TooLong(self.limit),
                    });
                }
                Next::End => break,
            }
            if batch.size >= BATCH && !send(std::mem::take(batch)) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
