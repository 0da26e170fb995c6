//! Operations that return their first input, and whose backward is given.

use std::fmt;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};

/// Returns the first of `inputs`. The backward calls `backward` with its gradient, for the gradients of the inputs.
///
/// `name` is written where the operation is printed.
pub(super) fn identity<const D: usize>(
    name: &'static str,
    inputs: Vec<DispatchTensor>,
    backward: impl Fn(DispatchTensor) -> Vec<Option<DispatchTensor>> + Send + Sync + 'static,
) -> Tensor<D> {
    apply(inputs, Identity { name, backward })
}

struct Identity<F> {
    name: &'static str,
    backward: F,
}

impl<F> Function for Identity<F>
where
    F: Fn(DispatchTensor) -> Vec<Option<DispatchTensor>> + Send + Sync + 'static,
{
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.swap_remove(0), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        (self.backward)(gradient)
    }
}

impl<F> fmt::Debug for Identity<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
