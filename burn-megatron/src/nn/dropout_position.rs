//! The current step and sample, for the random streams of dropout.

use std::sync::Arc;

use parking_lot::Mutex;

/// The step and the first sample of the current micro-batch, shared by all modules of a model.
///
/// A dropout mask is a function of the seed, the module's path, the step, and the index of each element
/// in the *global* batch. So it is the same in every layout, and a repeated forward (recomputation,
/// resume) draws the same mask.
#[derive(Clone, Debug, Default)]
pub struct DropoutPosition(Arc<Mutex<(u64, u64)>>);

impl DropoutPosition {
    /// Sets the step, and which sample of the global batch row 0 of the next input is.
    pub fn set(&self, step: u64, first_sample: u64) {
        *self.0.lock() = (step, first_sample);
    }

    /// The step, and the sample of row 0.
    pub fn get(&self) -> (u64, u64) {
        *self.0.lock()
    }

    /// Runs `body` at another position, as returned by [`get`](Self::get), and restores the current one,
    /// also when `body` panics.
    pub fn at<T>(&self, (step, first_sample): (u64, u64), body: impl FnOnce() -> T) -> T {
        let _restore = RestorePosition(self, self.get());
        self.set(step, first_sample);
        body()
    }
}

/// Restores a position when dropped.
struct RestorePosition<'a>(&'a DropoutPosition, (u64, u64));

impl Drop for RestorePosition<'_> {
    fn drop(&mut self) {
        let (step, first_sample) = self.1;
        self.0.set(step, first_sample);
    }
}
