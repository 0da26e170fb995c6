//! Starts a backward from gradients that are supplied after the forward.

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
    /// A scalar whose backward passes the gradient in this slot to `output`: see [`BackwardRoot::of`].
    pub fn backward_root<const D: usize>(&self, output: Tensor<D>, anchor: Tensor<1>) -> Tensor<1> {
        let root = BackwardRoot(vec![Some(self.clone())]);
        root.of(vec![output.into_dispatch()], anchor)
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

/// Passes the gradients in the slots to its inputs, in order; none to one without.
#[derive(Debug)]
pub(crate) struct BackwardRoot(pub Vec<Option<GradientSlot>>);

impl BackwardRoot {
    /// A scalar whose backward is that of `outputs`.
    ///
    /// Only the graph of the outputs is kept, not their data. `anchor`, `[1]`, is tracked, so that there is a backward even
    /// if no output is.
    pub fn of(self, outputs: Vec<DispatchTensor>, anchor: Tensor<1>) -> Tensor<1> {
        apply([outputs, vec![anchor.into_dispatch()]].concat(), self)
    }
}

impl Function for BackwardRoot {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.swap_remove(self.0.len()), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        _gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gradient = |slot: &Option<GradientSlot>| slot.as_ref().and_then(GradientSlot::take);
        self.0.iter().map(gradient).chain([None]).collect()
    }
}
