//! The fused loss, which consists of three kernel stages and one collective.

use burn::backend::DispatchTensor;
use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::cross_entropy::{
    CrossEntropyOptions, VocabularyShard, combine, gradient, loss_and_gradient, statistics,
};
use burn_megatron_kernels::flat::scale;
use burn_megatron_kernels::{Function, apply};

use super::LossFactor;
use super::components::{ComponentsCell, LossComponents};
use crate::collective::{CollectiveOp, Comm, start};
use crate::nn::forward_context::is_tracked;
use crate::nn::wide::wide;

/// The loss of logits `[rows, width]` that have the columns of `part`. The tensors are not tracked by autodiff.
#[derive(Clone, Debug)]
pub(super) struct FusedLoss {
    pub part: VocabularyShard,
    pub options: CrossEntropyOptions,
    pub comm: Comm,
    /// Whether the components of the loss are computed.
    pub has_components: bool,
}

/// The losses of some rows.
pub(super) struct FusedLosses {
    /// The loss of each row: `[rows]`.
    pub loss: Tensor<1>,
    pub components: Option<LossComponents>,
}

impl FusedLoss {
    /// Returns the losses of `logits` with the targets `[rows]`, and the log-sum-exp `[rows]`. This call is collective:
    /// make it on all ranks of `comm`.
    pub fn forward(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> (FusedLosses, Tensor<1>) {
        let local = statistics(logits, targets.clone(), &self.part);
        let local = local.unsqueeze_dim::<3>(0);
        let all = start(local, &CollectiveOp::Gather { dim: 0 }, &self.comm).wait();
        let tokens = self.part.tokens;
        let (loss, log_sum_exp) = combine(all.clone(), targets.clone(), tokens, &self.options);
        let components = || self.components(all, targets, &loss, &log_sum_exp);
        let losses = FusedLosses {
            components: self.has_components.then(components),
            loss,
        };
        (losses, log_sum_exp)
    }

    /// Returns the losses, and the [gradient](Self::gradient) of the logits. The gradient of the losses must already be
    /// known. The call is collective over the same ranks as [`forward`](Self::forward).
    pub fn with_gradient(
        &self,
        logits: Tensor<2>,
        targets: Tensor<1, Int>,
        upstream: Tensor<1>,
    ) -> (FusedLosses, Tensor<2>) {
        if self.comm.size() == 1 && !self.has_components {
            let (tokens, options) = (self.part.tokens, &self.options);
            let (loss, gradient) = loss_and_gradient(logits, targets, upstream, tokens, options);
            let components = None;
            return (FusedLosses { loss, components }, gradient);
        }
        let (losses, log_sum_exp) = self.forward(logits.clone(), targets.clone());
        let gradient = self.gradient(logits, targets, log_sum_exp, upstream);
        (losses, gradient)
    }

    /// Returns the gradient of `logits`, given the gradient of the losses. If no other tensor shares the memory of the
    /// logits, the gradient overwrites them.
    pub fn gradient(
        &self,
        logits: Tensor<2>,
        targets: Tensor<1, Int>,
        log_sum_exp: Tensor<1>,
        upstream: Tensor<1>,
    ) -> Tensor<2> {
        let (part, options) = (&self.part, &self.options);
        gradient(logits, targets, log_sum_exp, upstream, part, options)
    }

    /// Returns the components of the loss, given the statistics of all parts.
    fn components(
        &self,
        all: Tensor<3>,
        targets: Tensor<1, Int>,
        loss: &Tensor<1>,
        lse: &Tensor<1>,
    ) -> LossComponents {
        let CrossEntropyOptions { z_loss, ignore, .. } = self.options;
        let plain = CrossEntropyOptions {
            ignore,
            ..CrossEntropyOptions::default()
        };
        let (plain, _) = combine(all, targets.clone(), self.part.tokens, &plain);
        let z_loss = (z_loss != 0.0).then(|| {
            let squares = (lse.clone() * lse.clone()).mul_scalar(z_loss);
            match ignore {
                Some(ignore) => squares.mask_fill(targets.equal_elem(ignore), 0.0),
                None => squares,
            }
        });
        LossComponents {
            loss: loss.clone(),
            plain,
            z_loss,
        }
    }
}

/// Maps logits `[tokens, width]` and targets `[tokens]` to losses `[tokens]`, or to their sum `[1]` if `factor` is
/// given. Writes the components to `components`.
pub(super) fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    loss: FusedLoss,
    components: ComponentsCell,
    factor: Option<LossFactor>,
) -> Tensor<1> {
    let function = FusedCrossEntropy {
        loss,
        targets,
        components,
        factor,
        is_tracked: is_tracked(&logits),
    };
    apply(vec![logits.into_dispatch()], function)
}

#[derive(Debug)]
struct FusedCrossEntropy {
    loss: FusedLoss,
    targets: Tensor<1, Int>,
    components: ComponentsCell,
    /// With a factor, the output is the sum of the losses, and the forward pass computes the gradient of the logits.
    factor: Option<LossFactor>,
    is_tracked: bool,
}

impl Function for FusedCrossEntropy {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let logits = Tensor::<2>::from_dispatch(inputs.remove(0));
        let targets = self.targets.clone();
        let known = self.factor.as_ref().filter(|_| self.is_tracked);
        let (FusedLosses { loss, components }, saved) = match known {
            Some(factor) => {
                let (tokens, device) = (logits.dims()[0], logits.device());
                let upstream = factor.expanded(tokens, &device, wide(logits.dtype()));
                let (losses, gradient) = self.loss.with_gradient(logits, targets, upstream);
                (losses, vec![gradient.into_dispatch()])
            }
            None => {
                let (losses, log_sum_exp) = self.loss.forward(logits.clone(), targets);
                let saved = vec![logits.into_dispatch(), log_sum_exp.into_dispatch()];
                (losses, saved)
            }
        };
        self.components.put(components);
        let output = match self.factor {
            Some(_) => loss.sum(),
            None => loss,
        };
        (output.into_dispatch(), saved)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        upstream: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let upstream = Tensor::from_dispatch(upstream);
        // Tensors are moved, so that the gradient of the logits can overwrite them.
        let mut saved = saved.into_iter();
        let gradient = match (&self.factor, saved.next(), saved.next()) {
            (Some(factor), Some(gradient), None) => {
                scale(Tensor::<2>::from_dispatch(gradient), factor.ratio(upstream))
            }
            (None, Some(logits), Some(log_sum_exp)) => {
                let (logits, lse) = (
                    Tensor::from_dispatch(logits),
                    Tensor::from_dispatch(log_sum_exp),
                );
                self.loss
                    .gradient(logits, self.targets.clone(), lse, upstream)
            }
            _ => unreachable!("the forward saved others"),
        };
        vec![Some(gradient.into_dispatch())]
    }
}
