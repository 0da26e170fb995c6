//! The current step and sample, for the random streams of dropout.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::context::SequenceShard;

/// The step and the tokens of the current micro-batch, shared by all modules of a model.
///
/// A dropout mask is a function of the seed, the module's path, the step, and the index of each element
/// in the *global* batch. So it is the same in every layout, and a repeated forward (recomputation,
/// resume) draws the same mask.
#[derive(Clone, Debug, Default)]
pub struct DropoutPosition {
    current: Arc<Mutex<BatchPosition>>,
    /// Whether a layer drops anything.
    is_used: Arc<AtomicBool>,
}

/// Where the tokens of a micro-batch stand in the run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchPosition {
    /// The step.
    pub step: u64,
    /// The sample of the global batch that row 0 is.
    pub first_sample: u64,
    /// The tokens of each row on this rank; all of them without context parallelism.
    pub shard: Option<Arc<SequenceShard>>,
}

impl BatchPosition {
    /// Rows with all tokens.
    pub fn new(step: u64, first_sample: u64) -> Self {
        Self {
            step,
            first_sample,
            shard: None,
        }
    }
}

impl DropoutPosition {
    /// Sets the step, and which sample of the global batch row 0 of the next input is, of rows with all tokens.
    pub fn set(&self, step: u64, first_sample: u64) {
        self.set_batch(BatchPosition::new(step, first_sample));
    }

    /// Sets where the next input stands.
    pub fn set_batch(&self, position: BatchPosition) {
        *self.current.lock() = position;
    }

    /// Where the current input stands.
    pub fn get(&self) -> BatchPosition {
        self.current.lock().clone()
    }

    /// A layer that drops with a probability above 0 is built.
    pub(super) fn set_used(&self) {
        self.is_used.store(true, Ordering::Relaxed);
    }

    /// Whether the model has such a layer.
    pub fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Relaxed)
    }

    /// Runs `body` at another position, as returned by [`get`](Self::get), and restores the current one,
    /// also when `body` panics.
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
