//! The one autodiff function behind every collective of this room.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::Function;

use super::{Comm, Move, start};

/// One move forward, its conjugate backward.
#[derive(Debug)]
pub(super) struct Conjugate<const D: usize> {
    pub comm: Comm,
    pub forward: Move,
    pub backward: Move,
}

impl<const D: usize> Conjugate<D> {
    fn run(&self, x: DispatchTensor, way: &Move) -> DispatchTensor {
        start::<D>(Tensor::from_dispatch(x), way, &self.comm)
            .wait()
            .into_dispatch()
    }
}

impl<const D: usize> Function for Conjugate<D> {
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
