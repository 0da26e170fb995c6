//! The masked softmax as an autodiff function.

use burn::backend::{DispatchTensor, TensorMetadata};

#[cfg(feature = "cubecl")]
use super::kernel;
use super::{KeyRange, NAME, SinkKind, SoftmaxProblem, cpu};
use crate::cpu::wide;
use crate::function::{Function, Gradients, Tensors};
use crate::launch::{SimpleOp, Spec, launch};

/// The masked softmax as an autodiff function. Its inputs are the scores and, if it is learned, the sink.
#[derive(Debug)]
pub(super) struct MaskedSoftmax {
    pub plan: SoftmaxProblem,
    /// The lengths of the sequences, or the tensor that masks keys.
    pub mask: Option<DispatchTensor>,
}

impl MaskedSoftmax {
    /// Returns the shapes and types of the scores (or their gradient) and of the values of a learned sink.
    fn outputs(&self, scores: &DispatchTensor, of_sink: &[usize]) -> Vec<Spec> {
        let mut outputs = vec![Spec::of_any(scores)];
        if self.plan.sink == SinkKind::Learned {
            outputs.push(Spec::new(of_sink, wide(scores.dtype())));
        }
        outputs
    }
}

impl Function for MaskedSoftmax {
    /// Launches the forward kernel. From the scores, a learned sink and the mask tensor, it computes the probabilities
    /// and, with a learned sink, the probability of the sink in each row.
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        inputs.extend(self.mask.clone());
        let op = SimpleOp {
            name: NAME,
            parameters: self.plan,
            outputs: self.outputs(&inputs[0], &self.plan.shape[..3]),
            cpu: cpu::forward,
            #[cfg(feature = "cubecl")]
            cube: kernel::forward,
        };
        let saved = launch(op, inputs);
        (saved[0].clone(), saved)
    }

    /// Launches the backward kernel. From the probabilities, their gradient, the probability of a learned sink and the
    /// lengths, it computes the gradients of the scores and of the sink.
    fn backward(&self, mut saved: Tensors, gradient: DispatchTensor, _: &[bool]) -> Gradients {
        saved.insert(1, gradient);
        // If a key is masked by a tensor, its probability is 0.
        if self.plan.span == KeyRange::Lengths {
            saved.extend(self.mask.clone());
        }
        let op = SimpleOp {
            name: NAME,
            parameters: self.plan,
            outputs: self.outputs(&saved[0], &self.plan.shape[1..2]),
            cpu: cpu::backward,
            #[cfg(feature = "cubecl")]
            cube: kernel::backward,
        };
        launch(op, saved).into_iter().map(Some).collect()
    }
}
