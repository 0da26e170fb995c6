//! Micro-batches in which a single function runs the forward and the backward, as in `TrainStep::step` of burn-train.

use parking_lot::Mutex;

/// The current micro-batch of a function that calls the backward itself.
#[derive(Default)]
pub(super) struct OwnBackward(Mutex<Option<MicroBatch>>);

#[derive(Clone, Copy)]
pub(super) struct MicroBatch {
    pub weight: f64,
    /// Whether this is the last micro-batch of the step and no gradient has been received yet.
    pub is_last: bool,
}

impl OwnBackward {
    /// Returns the factor of the next gradient, and a flag. The flag is true only before the first gradient of the last
    /// micro-batch, after which no forward follows in this step. Call this method before each gradient.
    pub fn begin_gradient(&self) -> (f64, bool) {
        match &mut *self.0.lock() {
            Some(batch) => (batch.weight, std::mem::take(&mut batch.is_last)),
            None => (1.0, false),
        }
    }

    pub fn set(&self, batch: Option<MicroBatch>) {
        *self.0.lock() = batch;
    }
}
