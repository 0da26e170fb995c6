//! The autodiff function with which every collective of this module is implemented.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::Function;

use super::async_ops::{CollectiveOp, PendingTensor, start};
use super::group::Comm;

/// An autodiff function with a collective in the forward and the transpose of the collective in the backward.
#[derive(Debug)]
pub(super) struct CollectiveFunction<const D: usize> {
    pub comm: Comm,
    pub forward: CollectiveOp,
    pub backward: CollectiveOp,
}

impl<const D: usize> CollectiveFunction<D> {
    fn start(&self, x: DispatchTensor, op: &CollectiveOp) -> PendingTensor<D> {
        start(Tensor::from_dispatch(x), op, &self.comm)
    }
}

impl<const D: usize> Function for CollectiveFunction<D> {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let pending = self.start(inputs.remove(0), &self.forward);
        (pending.wait().into_dispatch(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let pending = self.start(gradient, &self.backward);
        vec![Some(pending.wait().into_dispatch())]
    }
}
