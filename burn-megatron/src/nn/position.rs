//! Where the training stands, for the random streams of dropout.

use std::sync::{Arc, Mutex, PoisonError};

/// The step and the first sample of the micro-batch at hand, shared by all modules of a model.
///
/// A dropout mask is a function of the seed, the module's path, the step, and the place of each
/// element in the *whole* batch. So it is the same under every layout, and a repeated forward
/// (recomputation, resume) draws it again.
#[derive(Clone, Debug, Default)]
pub struct Position(Arc<Mutex<(u64, u64)>>);

impl Position {
    /// Goes to `step`, where row 0 of the next input is sample `first_sample` of the global batch.
    pub fn set(&self, step: u64, first_sample: u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (step, first_sample);
    }

    /// The step, and the sample of row 0.
    pub fn get(&self) -> (u64, u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `body` at another place, as [`get`](Self::get) gave it, and comes back, also when `body`
    /// unwinds.
    pub fn at<T>(&self, (step, first_sample): (u64, u64), body: impl FnOnce() -> T) -> T {
        let _back = Back(self, self.get());
        self.set(step, first_sample);
        body()
    }
}

/// Goes back to a place.
struct Back<'a>(&'a Position, (u64, u64));

impl Drop for Back<'_> {
    fn drop(&mut self) {
        let (step, first_sample) = self.1;
        self.0.set(step, first_sample);
    }
}
