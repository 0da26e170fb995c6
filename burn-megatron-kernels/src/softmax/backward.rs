//! The autodiff function, and its forward and backward as device operations.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{KeyRange, NAME, SinkKind, SoftmaxProblem, cpu};
use crate::Function;
use crate::cpu::wide;
use crate::launch::{DeviceOp, Spec, launch};

/// Inputs: the scores and, where it is learned, the sink.
#[derive(Debug)]
pub(super) struct MaskedSoftmax {
    pub plan: SoftmaxProblem,
    /// The lengths, or the tensor that hides keys.
    pub mask: Option<DispatchTensor>,
}

impl Function for MaskedSoftmax {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        inputs.extend(self.mask.clone());
        let saved = launch(SoftmaxForwardOp(self.plan), inputs);
        (saved[0].clone(), saved)
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        saved.insert(1, gradient);
        // A key masked by a tensor is recognised by its probability, 0.
        if self.plan.span == KeyRange::Lengths {
            saved.extend(self.mask.clone());
        }
        let gradients = launch(SoftmaxBackwardOp(self.plan), saved);
        gradients.into_iter().map(Some).collect()
    }
}

/// From scores, a learned sink and the tensor of the mask to probabilities and, with a learned sink,
/// its share of each row.
#[derive(Debug)]
pub(super) struct SoftmaxForwardOp(pub SoftmaxProblem);

impl DeviceOp for SoftmaxForwardOp {
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
pub(super) struct SoftmaxBackwardOp(pub SoftmaxProblem);

impl DeviceOp for SoftmaxBackwardOp {
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
