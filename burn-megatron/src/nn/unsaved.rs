//! Differentiable operations that are given as two closures and save no tensors.

use std::fmt;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{MultiFunction, apply_multi};

/// Applies `forward` to the inputs. In the backward pass, `backward` maps the output gradient to the input gradients.
///
/// `name` is the name of the operation in reports.
pub(super) fn unsaved<const D: usize>(
    name: &'static str,
    inputs: Vec<DispatchTensor>,
    forward: impl Fn(Vec<DispatchTensor>) -> DispatchTensor + Send + Sync + 'static,
    backward: impl Fn(DispatchTensor) -> Vec<Option<DispatchTensor>> + Send + Sync + 'static,
) -> Tensor<D> {
    let operation = Unsaved {
        name,
        forward,
        backward,
    };
    let [output] = apply_multi(inputs, operation);
    output
}

/// Returns the first input. In the backward pass, `backward` maps the output gradient to the input gradients, as in
/// [`unsaved`].
pub(super) fn identity<const D: usize>(
    name: &'static str,
    inputs: Vec<DispatchTensor>,
    backward: impl Fn(DispatchTensor) -> Vec<Option<DispatchTensor>> + Send + Sync + 'static,
) -> Tensor<D> {
    unsaved(name, inputs, |mut inputs| inputs.swap_remove(0), backward)
}

struct Unsaved<F, B> {
    name: &'static str,
    forward: F,
    backward: B,
}

impl<F, B> MultiFunction for Unsaved<F, B>
where
    F: Fn(Vec<DispatchTensor>) -> DispatchTensor + Send + Sync + 'static,
    B: Fn(DispatchTensor) -> Vec<Option<DispatchTensor>> + Send + Sync + 'static,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        (vec![(self.forward)(inputs)], vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        mut gradients: Vec<Option<DispatchTensor>>,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        match gradients.remove(0) {
            Some(gradient) => (self.backward)(gradient),
            None => unreachable!("the backward runs for an output with a gradient"),
        }
    }
}

impl<F, B> fmt::Debug for Unsaved<F, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
