//! The current training step and sample, which determine the dropout masks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::context::SequenceShard;

/// The training step and the tokens of the current micro-batch. All modules of a model share this value.
///
/// A dropout mask is a function of the seed, the module path, the step, and the index of each element in the *global*
/// batch. The mask is therefore the same in every layout. A forward pass that is repeated for recomputation or after a
/// resume draws the same mask again.
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
    /// The index of the first sample of the micro-batch in the global batch.
    pub first_sample: u64,
    /// The tokens of each row that this rank holds under context parallelism. `None` if this rank holds complete rows.
    pub shard: Option<Arc<SequenceShard>>,
}

impl BatchPosition {
    /// Creates the position of a micro-batch with complete rows, without context parallelism.
    pub fn new(step: u64, first_sample: u64) -> Self {
        Self {
            step,
            first_sample,
            shard: None,
        }
    }
}

impl DropoutPosition {
    /// Sets the position of the next input, which has complete rows. `first_sample` is the index of the first sample of
    /// the input in the global batch.
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

    /// Runs `body` at `position`, for example a position that [`get`](Self::get) returned earlier. Restores the current
    /// position afterwards, even if `body` panics.
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
