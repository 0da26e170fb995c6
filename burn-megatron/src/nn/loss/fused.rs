//! The fused loss: the kernels' three stages, with one collective between them.

use burn::backend::DispatchTensor;
use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::cross_entropy::{
    CrossEntropyOptions, VocabularyShard, combine, gradient, statistics,
};
use burn_megatron_kernels::{Function, apply};

use super::{ComponentsCell, LossComponents};
use crate::collective::{Comm, start_all_gather};

/// Logits `[tokens, width]` of the columns of `part` and targets `[tokens]` to losses `[tokens]`; writes
/// their components to `components`.
pub(super) fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    part: VocabularyShard,
    options: &CrossEntropyOptions,
    comm: &Comm,
    components: Option<ComponentsCell>,
) -> Tensor<1> {
    let function = FusedCrossEntropy {
        components,
        targets,
        part,
        options: options.clone(),
        comm: comm.clone(),
    };
    apply(vec![logits.into_dispatch()], function)
}

#[derive(Debug)]
struct FusedCrossEntropy {
    targets: Tensor<1, Int>,
    part: VocabularyShard,
    options: CrossEntropyOptions,
    comm: Comm,
    components: Option<ComponentsCell>,
}

impl FusedCrossEntropy {
    /// The components of the loss, from the statistics of all parts.
    fn components(&self, all: Tensor<3>, lse: &Tensor<1>) -> LossComponents {
        let CrossEntropyOptions { z_loss, ignore, .. } = self.options;
        let plain = CrossEntropyOptions {
            ignore,
            ..CrossEntropyOptions::default()
        };
        let (plain, _) = combine(all, self.targets.clone(), self.part.tokens, &plain);
        let z_loss = (z_loss != 0.0).then(|| {
            let squares = (lse.clone() * lse.clone()).mul_scalar(z_loss);
            match ignore {
                Some(ignore) => squares.mask_fill(self.targets.clone().equal_elem(ignore), 0.0),
                None => squares,
            }
        });
        LossComponents { plain, z_loss }
    }
}

impl Function for FusedCrossEntropy {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let logits = Tensor::<2>::from_dispatch(inputs.remove(0));
        let local = statistics(logits.clone(), self.targets.clone(), &self.part);
        let local = local.unsqueeze_dim::<3>(0);
        let all = match self.comm.size() {
            1 => local,
            _ => start_all_gather(local, 0, &self.comm).wait(),
        };
        let (targets, tokens) = (self.targets.clone(), self.part.tokens);
        let (loss, lse) = combine(all.clone(), targets, tokens, &self.options);
        if let Some(components) = &self.components {
            components.put(self.components(all, &lse));
        }
        let saved = vec![logits.into_dispatch(), lse.into_dispatch()];
        (loss.into_dispatch(), saved)
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        upstream: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let lse = Tensor::<1>::from_dispatch(saved.remove(1));
        // The logits are moved, so that their gradient can overwrite them.
        let logits = Tensor::<2>::from_dispatch(saved.remove(0));
        let upstream = Tensor::from_dispatch(upstream);
        let targets = self.targets.clone();
        let gradient = gradient(logits, targets, lse, upstream, &self.part, &self.options);
        vec![Some(gradient.into_dispatch())]
    }
}
