//! The unfused loss, which uses Burn's operations and saves the probabilities for the backward pass.

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Int, Tensor};
use burn_megatron_kernels::{Function, apply};

use super::components::{ComponentsCell, LossComponents};
use super::fused::FusedLoss;
use crate::collective::{CollectiveOp, Comm, start};
use crate::comm::ReduceOp;

/// See [`super::fused::cross_entropy`].
pub(super) fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    loss: FusedLoss,
    components: ComponentsCell,
) -> Tensor<1> {
    let (part, options) = (loss.part, loss.options);
    let [_, width] = logits.dims();
    let targets = targets.unsqueeze_dim::<2>(1);
    let counts = match options.ignore {
        Some(ignore) => targets.clone().not_equal_scalar(ignore),
        None => targets.clone().equal(targets.clone()),
    };
    let no_token = targets.clone().lower_scalar(0);
    let no_token = no_token.bool_or(targets.clone().greater_equal_scalar(part.tokens as i64));
    let own = targets - part.first as i64;
    let has_target = own
        .clone()
        .greater_equal_scalar(0)
        .bool_and(own.clone().lower_scalar(width as i64));
    let tokens = part.tokens as f64;
    let function = UnfusedCrossEntropy {
        comm: loss.comm,
        components: loss.has_components.then_some(components),
        real: part.tokens.saturating_sub(part.first).min(width),
        tokens: part.tokens,
        smoothing: match options.label_smoothing {
            0.0 => 0.0,
            smoothing => smoothing * tokens / (tokens - 1.0),
        },
        z_loss: options.z_loss,
        has_target: has_target.bool_and(counts.clone()),
        target: own.clamp(0, width as i64 - 1),
        is_invalid: no_token.bool_and(counts.clone()),
        counts,
    };
    apply(vec![logits.into_dispatch()], function)
}

/// The unfused loss as a differentiable operation. Tensors are `[tokens, 1]` unless stated otherwise.
#[derive(Debug)]
struct UnfusedCrossEntropy {
    comm: Comm,
    components: Option<ComponentsCell>,
    /// The number of this rank's vocabulary entries, without padding.
    real: usize,
    tokens: usize,
    smoothing: f64,
    z_loss: f64,
    /// The target as an index into this rank's entries, clamped to their range.
    target: Tensor<2, Int>,
    /// Whether this rank holds the target.
    has_target: Tensor<2, Bool>,
    /// Whether the token is not ignored.
    counts: Tensor<2, Bool>,
    /// Whether the token is not ignored but its target is not in the vocabulary.
    is_invalid: Tensor<2, Bool>,
}

impl UnfusedCrossEntropy {
    /// Replaces values by 0 for ignored tokens, and by NaN for invalid targets.
    fn masked(&self, x: Tensor<2>) -> Tensor<2> {
        x.mask_fill(self.counts.clone().bool_not(), 0.0)
            .mask_fill(self.is_invalid.clone(), f64::NAN)
    }

    fn sum(&self, x: Tensor<2>) -> Tensor<2> {
        reduce(x, ReduceOp::Sum, &self.comm)
    }

    /// Returns a tensor with the shape and dtype of `like`. It has `value` at the target if this rank holds the target,
    /// and 0 elsewhere.
    fn one_hot(&self, like: &Tensor<2>, value: f64) -> Tensor<2> {
        let zeros = Tensor::<2>::zeros(like.dims(), (&like.device(), like.dtype()));
        let has_target = self
            .has_target
            .clone()
            .float()
            .cast(like.dtype())
            .mul_scalar(value);
        zeros.scatter(
            1,
            self.target.clone(),
            has_target,
            burn::tensor::IndexingUpdateOp::Add,
        )
    }
}

impl Function for UnfusedCrossEntropy {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let logits = Tensor::<2>::from_dispatch(inputs.remove(0));
        let [rows, width] = logits.dims();
        // A rank may have only padding entries. The largest logit of a real token is then on another rank.
        let real = logits.narrow(1, 0, self.real.max(1));
        let max = match self.real {
            0 => real.clone().mul_scalar(0.0).add_scalar(f64::from(f32::MIN)),
            _ => real.clone().max_dim(1),
        };
        let max = reduce(max, ReduceOp::Max, &self.comm);
        let shifted = real - max.clone();

        let zero_if_padding = |x: Tensor<2>| if self.real == 0 { x.zeros_like() } else { x };
        let exps = zero_if_padding(shifted.clone().exp());
        let target = self.target.clone().clamp(0, self.real.max(1) as i64 - 1);
        let target = shifted.clone().gather(1, target);
        let target = zero_if_padding(target.mask_fill(self.has_target.clone().bool_not(), 0.0));
        // The three sums share one collective.
        let mut sums = vec![exps.clone().sum_dim(1), target];
        if self.smoothing != 0.0 {
            sums.push(zero_if_padding(shifted).sum_dim(1));
        }
        let sums = self.sum(Tensor::cat(sums, 1));

        let log_sum = sums.clone().narrow(1, 0, 1).log();
        let mut loss = log_sum.clone() - sums.clone().narrow(1, 1, 1) * (1.0 - self.smoothing);
        if self.smoothing != 0.0 {
            loss = loss - sums.clone().narrow(1, 2, 1) * (self.smoothing / self.tokens as f64);
        }
        // Without target and smoothing, the derivative of the loss with respect to a logit is `p` times this slope.
        let mut slope = log_sum.ones_like();
        let mut z_loss = None;
        let plain = || log_sum.clone() - sums.clone().narrow(1, 1, 1);
        let plain = self.components.is_some().then(plain);
        if self.z_loss != 0.0 {
            let lse = log_sum + max;
            let squares = (lse.clone() * lse.clone()).mul_scalar(self.z_loss);
            loss = loss + squares.clone();
            slope = lse.mul_scalar(2.0 * self.z_loss).add_scalar(1.0);
            z_loss = Some(squares);
        }
        let loss = self.masked(loss);
        if let Some((components, plain)) = self.components.as_ref().zip(plain) {
            let row = |x| self.masked(x).reshape([rows]);
            components.put(Some(LossComponents {
                loss: loss.clone().reshape([rows]),
                plain: row(plain),
                z_loss: z_loss.map(row),
            }));
        }
        let probabilities = exps * (slope / sums.narrow(1, 0, 1));
        let padding = width - self.real.max(1);
        let probabilities = match padding {
            0 => probabilities,
            _ => {
                let options = (&probabilities.device(), probabilities.dtype());
                let zeros = Tensor::zeros([rows, padding], options);
                Tensor::cat(vec![probabilities, zeros], 1)
            }
        };
        (
            loss.reshape([rows]).into_dispatch(),
            vec![probabilities.into_dispatch()],
        )
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let probabilities = Tensor::<2>::from_dispatch(saved.remove(0));
        let [_, width] = probabilities.dims();
        let gradient = Tensor::<1>::from_dispatch(gradient).unsqueeze_dim::<2>(1);
        let gradient = self.masked(gradient);

        let target = self.one_hot(&probabilities, 1.0 - self.smoothing);
        let mut logits = probabilities - target;
        if self.smoothing != 0.0 && self.real > 0 {
            let share = self.smoothing / self.tokens as f64;
            let real = logits.clone().narrow(1, 0, self.real).sub_scalar(share);
            logits = match width - self.real {
                0 => real,
                padding => Tensor::cat(vec![real, logits.narrow(1, self.real, padding)], 1),
            };
        }
        let logits = logits * gradient;
        vec![Some(logits.into_dispatch())]
    }
}

fn reduce(x: Tensor<2>, op: ReduceOp, comm: &Comm) -> Tensor<2> {
    start(x, &CollectiveOp::AllReduce(op), comm).wait()
}
