//! Cross entropy over logits that are split along the vocabulary.

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Int, Tensor};
use burn_megatron_kernels::{Function, apply};

use super::{Place, Vocabulary};
use crate::collective::{Comm, start_all_reduce};
use crate::comm::ReduceOp;

/// Cross entropy per token, without ever gathering the logits.
///
/// With `K` the number of tokens of the vocabulary (padding not counted), `t` the target and `e`
/// the label smoothing, `s = e K / (K - 1)`:
///
/// ```text
/// loss = (1 - s) * -log p[t]  +  s * mean over k of -log p[k]
/// ```
///
/// so that the target keeps `1 - e` and the others share `e`. Padded entries have no probability
/// and no gradient. The result does not depend on the number of ranks.
///
/// A target that is no token and not to be ignored is a fault of the data: its loss and its
/// gradient are NaN, so that it cannot pass unseen. (An error would have to wait for the device.)
#[derive(Clone, Debug)]
pub struct VocabParallelCrossEntropy {
    comm: Comm,
    vocabulary: Vocabulary,
    /// In `[0, 1)`.
    label_smoothing: f64,
    /// Tokens with this target have no loss and no gradient.
    ignore: Option<i64>,
}

impl VocabParallelCrossEntropy {
    /// A loss over the ranks of `comm`, without smoothing, that ignores no target.
    pub fn new(vocabulary: Vocabulary, comm: &Comm) -> Self {
        Self {
            comm: comm.clone(),
            vocabulary,
            label_smoothing: 0.0,
            ignore: None,
        }
    }

    /// Sets the label smoothing.
    pub fn with_label_smoothing(mut self, label_smoothing: f64) -> Self {
        self.label_smoothing = label_smoothing;
        self
    }

    /// Sets the target that has no loss.
    pub fn with_ignore(mut self, ignore: Option<i64>) -> Self {
        self.ignore = ignore;
        self
    }

    /// This rank's logits `[batch, seq, padded vocabulary / tensor]` and the targets
    /// `[batch, seq]` to the loss of each token `[batch, seq]`, the same on every rank.
    pub fn forward(&self, logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<2> {
        let [batch, seq, width] = logits.dims();
        let place = Place {
            index: self.comm.rank(),
            size: self.comm.size(),
        };
        let first = self.vocabulary.part(place).0;
        let targets = targets
            .reshape([batch * seq, 1])
            .to_device(&logits.device().inner());
        let targets = if targets.is_autodiff() {
            targets.inner()
        } else {
            targets
        };
        let kept = match self.ignore {
            Some(ignore) => targets.clone().not_equal_scalar(ignore),
            None => targets.clone().equal(targets.clone()),
        };
        let no_token = targets.clone().lower_scalar(0);
        let no_token = no_token.bool_or(
            targets
                .clone()
                .greater_equal_scalar(self.vocabulary.tokens as i64),
        );
        let own = targets - first as i64;
        let held = own
            .clone()
            .greater_equal_scalar(0)
            .bool_and(own.clone().lower_scalar(width as i64));
        let function = CrossEntropy {
            comm: self.comm.clone(),
            // The entries of this rank that are no padding.
            real: self.vocabulary.tokens.saturating_sub(first).min(width),
            tokens: self.vocabulary.tokens,
            smoothing: self.smoothing(),
            held: held.bool_and(kept.clone()),
            target: own.clamp(0, width as i64 - 1),
            fault: no_token.bool_and(kept.clone()),
            kept,
        };
        apply(vec![logits.into_dispatch()], function)
    }

    fn smoothing(&self) -> f64 {
        let tokens = self.vocabulary.tokens as f64;
        match self.label_smoothing {
            0.0 => 0.0,
            smoothing => smoothing * tokens / (tokens - 1.0),
        }
    }
}

/// Tensors here are `[tokens, 1]` unless said otherwise.
#[derive(Debug)]
struct CrossEntropy {
    comm: Comm,
    real: usize,
    tokens: usize,
    smoothing: f64,
    /// The target as an index into this rank's entries, kept within them.
    target: Tensor<2, Int>,
    /// Whether this rank has the target.
    held: Tensor<2, Bool>,
    /// Whether the token counts.
    kept: Tensor<2, Bool>,
    /// Whether it counts, but its target is not in the vocabulary.
    fault: Tensor<2, Bool>,
}

impl CrossEntropy {
    /// 0 where the token does not count, NaN where it should and cannot.
    fn marked(&self, x: Tensor<2>) -> Tensor<2> {
        x.mask_fill(self.kept.clone().bool_not(), 0.0)
            .mask_fill(self.fault.clone(), f64::NAN)
    }

    fn sum(&self, x: Tensor<2>) -> Tensor<2> {
        reduce(x, ReduceOp::Sum, &self.comm)
    }

    /// `value` where this rank holds the target, else 0; the same shape as the logits.
    fn one_hot(&self, like: &Tensor<2>, value: f64) -> Tensor<2> {
        let zeros = Tensor::<2>::zeros(like.dims(), (&like.device(), like.dtype()));
        let held = self
            .held
            .clone()
            .float()
            .cast(like.dtype())
            .mul_scalar(value);
        zeros.scatter(
            1,
            self.target.clone(),
            held,
            burn::tensor::IndexingUpdateOp::Add,
        )
    }
}

impl Function for CrossEntropy {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let logits = Tensor::<3>::from_dispatch(inputs.remove(0));
        let [batch, seq, width] = logits.dims();
        let logits = logits.reshape([batch * seq, width]);
        // A rank may hold nothing but padding; the largest real logit is on another one then.
        let real = logits.narrow(1, 0, self.real.max(1));
        let max = match self.real {
            0 => real.clone().mul_scalar(0.0).add_scalar(f64::from(f32::MIN)),
            _ => real.clone().max_dim(1),
        };
        let max = reduce(max, ReduceOp::Max, &self.comm);
        let shifted = real - max;

        let none = |x: Tensor<2>| if self.real == 0 { x.zeros_like() } else { x };
        let exps = none(shifted.clone().exp());
        let target = self.target.clone().clamp(0, self.real.max(1) as i64 - 1);
        let target = shifted.clone().gather(1, target);
        let target = none(target.mask_fill(self.held.clone().bool_not(), 0.0));
        // One collective for the three sums.
        let mut sums = vec![exps.clone().sum_dim(1), target];
        if self.smoothing != 0.0 {
            sums.push(none(shifted).sum_dim(1));
        }
        let sums = self.sum(Tensor::cat(sums, 1));

        let log_sum = sums.clone().narrow(1, 0, 1).log();
        let mut loss = log_sum.clone() - sums.clone().narrow(1, 1, 1) * (1.0 - self.smoothing);
        if self.smoothing != 0.0 {
            loss = loss - sums.clone().narrow(1, 2, 1) * (self.smoothing / self.tokens as f64);
        }
        let loss = self.marked(loss);
        let probabilities = exps / sums.narrow(1, 0, 1);
        let padding = width - self.real.max(1);
        let probabilities = match padding {
            0 => probabilities,
            _ => {
                let options = (&probabilities.device(), probabilities.dtype());
                let zeros = Tensor::zeros([batch * seq, padding], options);
                Tensor::cat(vec![probabilities, zeros], 1)
            }
        };
        (
            loss.reshape([batch, seq]).into_dispatch(),
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
        let gradient = Tensor::<2>::from_dispatch(gradient);
        let ([batch, seq], [tokens, width]) = (gradient.dims(), probabilities.dims());
        let gradient = gradient.reshape([tokens, 1]);
        let gradient = self.marked(gradient);

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
        vec![Some(logits.reshape([batch, seq, width]).into_dispatch())]
    }
}

fn reduce(x: Tensor<2>, op: ReduceOp, comm: &Comm) -> Tensor<2> {
    match comm.size() {
        1 => x,
        _ => start_all_reduce(x, op, comm).wait(),
    }
}
