//! Backward passes that start from gradients that are supplied after the forward pass.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::unsaved::unsaved;

/// Holds the gradient of an output until the backward pass of this output.
#[derive(Clone, Default)]
pub(crate) struct GradientSlot(Arc<Mutex<Option<DispatchTensor>>>);

impl GradientSlot {
    /// Returns a scalar whose backward pass starts at `output`, with the gradient in this slot. See [`backward_root`].
    pub fn backward_root<const D: usize>(&self, output: Tensor<D>, anchor: Tensor<1>) -> Tensor<1> {
        backward_root(
            vec![Some(self.clone())],
            vec![output.into_dispatch()],
            anchor,
        )
    }

    /// Stores the gradient.
    pub fn set(&self, gradient: DispatchTensor) {
        *self.0.lock() = Some(gradient);
    }

    /// Takes the gradient, or returns `None` if the slot is empty.
    pub fn take(&self) -> Option<DispatchTensor> {
        self.0.lock().take()
    }
}

impl fmt::Debug for GradientSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradientSlot")
    }
}

/// Returns a scalar. Its backward pass sends the gradients in the slots to `outputs`, in order. An output without a
/// slot gets no gradient.
///
/// Only the graph of the outputs is kept, not their data. `anchor` `[1]` is tracked, so that there is a backward pass
/// even if no output is tracked.
pub(crate) fn backward_root(
    slots: Vec<Option<GradientSlot>>,
    outputs: Vec<DispatchTensor>,
    anchor: Tensor<1>,
) -> Tensor<1> {
    let at = outputs.len();
    unsaved(
        "BackwardRoot",
        [outputs, vec![anchor.into_dispatch()]].concat(),
        move |mut inputs| inputs.swap_remove(at),
        move |_| {
            let gradient = |slot: &Option<GradientSlot>| slot.as_ref().and_then(GradientSlot::take);
            slots.iter().map(gradient).chain([None]).collect()
        },
    )
}
