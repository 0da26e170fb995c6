//! The complete cross entropy loss as an autodiff function.

use burn::backend::DispatchTensor;
use burn::tensor::{Int, Tensor};

use super::{CrossEntropyOptions, VocabularyShard, combined, gradient, statistics};
use crate::function::{Function, Gradients, Tensors};

/// The function that maps logits `[rows, width]` to the loss `[rows]`.
#[derive(Debug)]
pub(super) struct CrossEntropy {
    pub targets: Tensor<1, Int>,
    pub part: VocabularyShard,
    pub options: CrossEntropyOptions,
}

impl Function for CrossEntropy {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let logits = Tensor::<2>::from_dispatch(inputs.remove(0));
        let targets = self.targets.clone();
        let parts = statistics(logits.clone(), targets.clone(), &self.part);
        let parts = parts.into_dispatch();
        let (loss, lse) = combined(parts, targets, self.part.tokens, &self.options);
        let saved = vec![logits.into_dispatch(), lse.into_dispatch()];
        (loss.into_dispatch(), saved)
    }

    fn backward(&self, mut saved: Tensors, output: DispatchTensor, needed: &[bool]) -> Gradients {
        if !needed[0] {
            return vec![None];
        }
        // The logits are moved out of `saved`, so that no other tensor may share their memory.
        let logits = Tensor::from_dispatch(saved.remove(0));
        let lse = Tensor::from_dispatch(saved.remove(0));
        let output = Tensor::from_dispatch(output);
        let targets = self.targets.clone();
        let logits = gradient(logits, targets, lse, output, &self.part, &self.options);
        vec![Some(logits.into_dispatch())]
    }
}
