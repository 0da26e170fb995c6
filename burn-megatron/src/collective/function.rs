//! The autodiff function behind every collective of this module.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::Function;

use super::{CollectiveOp, Comm, start};

/// One collective in the forward, its transpose in the backward.
#[derive(Debug)]
pub(super) struct CollectiveFunction<const D: usize> {
    pub comm: Comm,
    pub forward: CollectiveOp,
    pub backward: CollectiveOp,
}

impl<const D: usize> CollectiveFunction<D> {
    fn run(&self, x: DispatchTensor, op: &CollectiveOp) -> DispatchTensor {
        start::<D>(Tensor::from_dispatch(x), op, &self.comm)
            .wait()
            .into_dispatch()
    }
}

impl<const D: usize> Function for CollectiveFunction<D> {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (self.run(inputs.remove(0), &self.forward), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        vec![Some(self.run(gradient, &self.backward))]
    }
}
