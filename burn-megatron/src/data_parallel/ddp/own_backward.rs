//! Micro-batches in which a single function runs both the forward and the backward.

use burn::module::Module;
use burn::tensor::Device;

use super::DistributedDataParallel;
use crate::data_parallel::own_backward::MicroBatch;
use crate::data_parallel::stores::{ParameterLoader, Stores};

impl<M: Module> DistributedDataParallel<M> {
    /// Runs a micro-batch with a function that calls the backward itself. Use it in place of [`forward`](Self::forward)
    /// and [`backward`](Self::backward) if the caller has no access to the loss. Since the loss of a micro-batch is
    /// often a mean, its gradients are multiplied by `weight`. A micro-batch with weight 0 does not update running
    /// states.
    ///
    /// `is_last` is true for the last micro-batch of the step. After its first gradient no further forward is expected,
    /// and each bucket is reduced as soon as its gradients are final, while the backward continues.
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

    /// Sets the parameters to the values of the parameters of `module`, which must not have hooks. Running states keep
    /// their values. Collective: call on all ranks, with equal values.
    pub fn set_parameters(&mut self, module: &M) {
        let stores = Stores::new(&self.whole, &self.running, &self.buffers);
        module.visit(&mut ParameterLoader(stores));
        self.finish_step();
    }
}
