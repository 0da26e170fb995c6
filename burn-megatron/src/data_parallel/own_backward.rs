//! A micro-batch whose backward is called by the function that runs its forward, as in `TrainStep::step` of burn-train.

use parking_lot::Mutex;

/// The micro-batch whose gradients such a function receives while it runs.
#[derive(Default)]
pub(super) struct OwnBackward(Mutex<Option<MicroBatch>>);

#[derive(Clone, Copy)]
pub(super) struct MicroBatch {
    pub weight: f64,
    /// Whether it is the last one of the step, and no gradient has been received yet.
    pub is_last: bool,
}

impl OwnBackward {
    /// Called before each gradient. Returns its factor, and whether no forward follows in this step, which is told once.
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
