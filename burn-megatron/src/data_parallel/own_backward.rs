//! A micro-batch whose backward is called by the function that runs its forward, as in `TrainStep::step` of burn-train.

use burn::module::Module;
use burn::tensor::Device;
use parking_lot::Mutex;

use super::DistributedDataParallel;

/// The micro-batch whose gradients such a function receives while it runs.
#[derive(Default)]
pub(super) struct OwnBackward(Mutex<Option<MicroBatch>>);

#[derive(Clone, Copy)]
struct MicroBatch {
    weight: f64,
    /// Whether it is the last one of the step, and no gradient has been received yet.
    is_last: bool,
}

impl OwnBackward {
    /// Called before each gradient. Returns its factor, and whether no forward follows in this step, which is told once.
    pub fn begin_gradient(&self) -> (f64, bool) {
        match &mut *self.0.lock() {
            Some(batch) => (batch.weight, std::mem::take(&mut batch.is_last)),
            None => (1.0, false),
        }
    }

    fn set(&self, batch: Option<MicroBatch>) {
        *self.0.lock() = batch;
    }
}

impl<M: Module> DistributedDataParallel<M> {
    /// Runs a micro-batch by a function that calls the backward itself: instead of [`forward`](Self::forward) and
    /// [`backward`](Self::backward), where the loss is not at hand. Its gradients are multiplied by `weight`, as
    /// the loss of one micro-batch is often a mean. A micro-batch with the weight 0 does not update running states.
    ///
    /// With `is_last` no further micro-batch follows in the step: the first gradient ends its forwards, and each bucket
    /// is reduced as soon as its gradients are final, while backward goes on.
    pub fn forward_and_backward<T>(
        &self,
        device: &Device,
        weight: f64,
        is_last: bool,
        body: impl FnOnce(&M) -> T,
    ) -> T {
        let buffers = &self.buffers;
        let kept = (weight == 0.0).then(|| self.running_states());
        buffers
            .own_backward
            .set(Some(MicroBatch { weight, is_last }));
        let output = self.forward(device, body);
        buffers.own_backward.set(None);
        buffers.gradients().tracker.end_backward();
        if let Some(states) = kept {
            self.set_running_states(states);
        }
        output
    }

    /// Sets the parameters to the parameters of `module`, which has no hooks. Running states keep their values. Collective:
    /// call on all ranks, with equal values.
    pub fn set_parameters(&mut self, module: &M) {
        let stores = super::build::Stores::new(&self.whole, &self.running, &self.buffers);
        module.visit(&mut super::build::ParameterLoader(stores));
        self.finish_step();
    }
}
