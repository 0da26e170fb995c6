//! Starts a backward from a gradient that is supplied after the forward.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};
use parking_lot::Mutex;

/// Holds the gradient of a stage's output until its backward.
#[derive(Clone, Default)]
pub(super) struct GradientSlot(Arc<Mutex<Option<DispatchTensor>>>);

impl GradientSlot {
    /// A scalar whose backward passes the gradient in this slot to `output`.
    ///
    /// Only the graph of `output` is kept, not its data. `anchor` is tracked, so that a stage without
    /// trainable parameters has a backward too.
    pub fn backward_root(&self, output: Tensor<3>, anchor: Tensor<1>) -> Tensor<1> {
        apply(
            vec![output.into_dispatch(), anchor.into_dispatch()],
            self.clone(),
        )
    }

    /// Stores the gradient.
    pub fn set(&self, gradient: Tensor<3>) {
        *self.0.lock() = Some(gradient.into_dispatch());
    }
}

impl fmt::Debug for GradientSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradientSlot")
    }
}

impl Function for GradientSlot {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let output = Tensor::<3>::from_dispatch(inputs.remove(0));
        let root = Tensor::<1>::zeros([1], (&output.device(), output.dtype()));
        (root.into_dispatch(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        _gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gradient = self.0.lock().take();
        assert!(
            gradient.is_some(),
            "a valid schedule receives the gradient before the backward"
        );
        vec![gradient, None]
    }
}
