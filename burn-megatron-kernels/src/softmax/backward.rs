//! Forward and backward as the autodiff seam wants them, and the kernels in their forms.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{NAME, Plan, SinkKind, Span, cpu};
use crate::Function;
use crate::cpu::wide;
use crate::launch::{Kernel, Spec, launch};

/// Inputs: the scores and, where it is learned, the sink.
#[derive(Debug)]
pub(super) struct MaskedSoftmax {
    pub plan: Plan,
    /// The lengths, or the tensor that hides keys.
    pub mask: Option<DispatchTensor>,
}

impl Function for MaskedSoftmax {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        inputs.extend(self.mask.clone());
        let saved = launch(Forward(self.plan), inputs);
        (saved[0].clone(), saved)
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        saved.insert(1, gradient);
        // What a tensor hides is known by its probability, 0.
        if self.plan.span == Span::Lengths {
            saved.extend(self.mask.clone());
        }
        let gradients = launch(Backward(self.plan), saved);
        gradients.into_iter().map(Some).collect()
    }
}

/// From scores, a learned sink and the tensor of the mask to probabilities and, with a learned sink,
/// its share of each row.
#[derive(Debug)]
pub(super) struct Forward(pub Plan);

impl Kernel for Forward {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let scores = &inputs[0];
        let mut outputs = vec![scores.clone()];
        if self.0.sink == SinkKind::Learned {
            let [batch, heads, queries, _] = self.0.shape;
            outputs.push(Spec::new([batch, heads, queries], wide(scores.dtype)));
        }
        outputs
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::forward(&self.0, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::forward(&self.0, inputs)
    }
}

/// From probabilities, their gradient, the share of a learned sink and the lengths to the gradients
/// of the scores and of the sink.
#[derive(Debug)]
pub(super) struct Backward(pub Plan);

impl Kernel for Backward {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let mut outputs = vec![inputs[0].clone()];
        if self.0.sink == SinkKind::Learned {
            outputs.push(Spec::new([self.0.shape[1]], wide(inputs[0].dtype)));
        }
        outputs
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::backward(&self.0, inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        super::kernel::backward(&self.0, inputs)
    }
}
