//! Starts a backward from a gradient that is supplied after the forward.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};
use parking_lot::Mutex;

/// Holds the gradient of an output until its backward.
#[derive(Clone, Default)]
pub(crate) struct GradientSlot(Arc<Mutex<Option<DispatchTensor>>>);

impl GradientSlot {
    /// A scalar whose backward passes the gradient in this slot to `output`.
    ///
    /// Only the graph of `output` is kept, not its data. `anchor`, `[1]`, is tracked, so that there is a backward even
    /// if `output` is not.
    pub fn backward_root<const D: usize>(&self, output: Tensor<D>, anchor: Tensor<1>) -> Tensor<1> {
        let inputs = vec![output.into_dispatch(), anchor.into_dispatch()];
        apply(inputs, self.clone())
    }

    /// Stores the gradient.
    pub fn set(&self, gradient: DispatchTensor) {
        *self.0.lock() = Some(gradient);
    }

    /// Takes the gradient, if there is one.
    pub fn take(&self) -> Option<DispatchTensor> {
        self.0.lock().take()
    }
}

impl fmt::Debug for GradientSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradientSlot")
    }
}

impl Function for GradientSlot {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.swap_remove(1), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        _gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gradient = self.take();
        assert!(
            gradient.is_some(),
            "the gradient is set before the backward"
        );
        vec![gradient, None]
    }
}
