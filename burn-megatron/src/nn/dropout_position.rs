//! The current step and sample, for the random streams of dropout.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::context::SequenceShard;

/// The step and the tokens of the current micro-batch, shared by all modules of a model.
///
/// A dropout mask is a function of the seed, the module path, the step, and the index of each element in the *global*
/// batch. The mask is therefore the same in every layout, and a repeated forward (recomputation, resume) draws it
/// again.
#[derive(Clone, Debug, Default)]
pub struct DropoutPosition {
    current: Arc<Mutex<BatchPosition>>,
    /// Whether the model has a layer with a dropout probability above 0.
    is_used: Arc<AtomicBool>,
}

/// The position of a micro-batch in the training run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchPosition {
    /// The training step.
    pub step: u64,
    /// The index of row 0 in the global batch.
    pub first_sample: u64,
    /// The tokens of each row on this rank. `None` without context parallelism: rows have all tokens.
    pub shard: Option<Arc<SequenceShard>>,
}

impl BatchPosition {
    /// Creates the position of rows that have all their tokens.
    pub fn new(step: u64, first_sample: u64) -> Self {
        Self {
            step,
            first_sample,
            shard: None,
        }
    }
}

impl DropoutPosition {
    /// Sets the step and the index of row 0 of the next input in the global batch. The rows have all their tokens.
    pub fn set(&self, step: u64, first_sample: u64) {
        self.set_batch(BatchPosition::new(step, first_sample));
    }

    /// Sets the position of the next input.
    pub fn set_batch(&self, position: BatchPosition) {
        *self.current.lock() = position;
    }

    /// Returns the position of the current input.
    pub fn get(&self) -> BatchPosition {
        self.current.lock().clone()
    }

    /// Records that the model has a layer with a dropout probability above 0.
    pub(super) fn set_used(&self) {
        self.is_used.store(true, Ordering::Relaxed);
    }

    /// Returns whether the model has a layer with a dropout probability above 0.
    pub fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Relaxed)
    }

    /// Runs `body` at another position, as returned by [`get`](Self::get). Restores the current position afterwards,
    /// even if `body` panics.
    pub fn at<T>(&self, position: BatchPosition, body: impl FnOnce() -> T) -> T {
        let _restore = RestorePosition(self, self.get());
        self.set_batch(position);
        body()
    }
}

/// Restores a position when dropped.
struct RestorePosition<'a>(&'a DropoutPosition, BatchPosition);

impl Drop for RestorePosition<'_> {
    fn drop(&mut self) {
        self.0.set_batch(std::mem::take(&mut self.1));
    }
}
