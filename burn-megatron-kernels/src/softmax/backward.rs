//! The autodiff function, and its forward and backward as one device operation.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{KeyRange, NAME, SinkKind, SoftmaxProblem, cpu};
use crate::cpu::wide;
use crate::function::{Function, Gradients, Tensors};
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
        let saved = launch(SoftmaxOp(self.plan, Direction::Forward), inputs);
        (saved[0].clone(), saved)
    }

    fn backward(
        &self,
        mut saved: Tensors,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Gradients {
        saved.insert(1, gradient);
        // A key masked by a tensor is recognised by its probability, 0.
        if self.plan.span == KeyRange::Lengths {
            saved.extend(self.mask.clone());
        }
        let gradients = launch(SoftmaxOp(self.plan, Direction::Backward), saved);
        gradients.into_iter().map(Some).collect()
    }
}

/// A direction of the operation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Direction {
    /// From scores, a learned sink and the tensor of the mask to probabilities and, with a learned sink, its share of each
    /// row.
    Forward,
    /// From probabilities, their gradient, the share of a learned sink and the lengths to the gradients of the scores and
    /// of the sink.
    Backward,
}

#[derive(Debug)]
struct SoftmaxOp(SoftmaxProblem, Direction);

impl DeviceOp for SoftmaxOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let Self(problem, direction) = self;
        let scores = &inputs[0];
        let [batch, heads, queries, _] = problem.shape;
        let of_sink = match direction {
            Direction::Forward => vec![batch, heads, queries],
            Direction::Backward => vec![heads],
        };
        let learned = problem.sink == SinkKind::Learned;
        let of_sink = learned.then(|| Spec::new(of_sink, wide(scores.dtype)));
        [Some(scores.clone()), of_sink]
            .into_iter()
            .flatten()
            .collect()
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        match self.1 {
            Direction::Forward => cpu::forward(&self.0, inputs),
            Direction::Backward => cpu::backward(&self.0, inputs),
        }
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        match self.1 {
            Direction::Forward => super::kernel::forward(&self.0, inputs),
            Direction::Backward => super::kernel::backward(&self.0, inputs),
        }
    }
}
