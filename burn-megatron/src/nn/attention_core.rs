//! Scores, softmax and weighted sum as one recorded step.
//!
//! The scores are held in memory (`[batch, heads, seq, seq]`), as the backward needs them.

use burn::backend::DispatchTensor;
use burn::tensor::{Bool, Tensor, activation::softmax};
use burn_megatron_kernels::{Function, apply};

use super::RotaryTable;

/// The heads of one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    /// Query heads.
    pub queries: usize,
    /// Groups of keys and values; consecutive query heads share one.
    pub groups: usize,
    /// Features of a head.
    pub width: usize,
}

/// Causal attention of `[batch, seq, (queries + 2 groups) * width]`, giving
/// `[batch, seq, queries * width]`. `mask` multiplies the probabilities (dropout).
pub(super) fn attend(
    qkv: Tensor<3>,
    heads: Heads,
    rotary: Option<RotaryTable>,
    mask: Option<Tensor<4>>,
) -> Tensor<3> {
    apply(
        vec![qkv.into_dispatch()],
        Attend {
            heads,
            rotary,
            mask,
        },
    )
}

#[derive(Debug)]
struct Attend {
    heads: Heads,
    rotary: Option<RotaryTable>,
    mask: Option<Tensor<4>>,
}

/// Queries come as `[batch, groups, heads per group * seq, width]`, so that one product serves all
/// heads of a group.
impl Function for Attend {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let qkv = Tensor::<3>::from_dispatch(inputs.remove(0));
        let (q, k, v) = self.split(qkv);
        let [batch, groups, rows, width] = q.dims();
        let seq = k.dims()[2];
        let scores = q
            .clone()
            .matmul(k.clone().swap_dims(2, 3))
            .mul_scalar(self.scale());
        let scores = scores.reshape([batch, self.heads.queries, seq, seq]);
        let future = Tensor::<4, Bool>::tril_mask([1, 1, seq, seq], 0, &scores.device()).expand([
            batch,
            self.heads.queries,
            seq,
            seq,
        ]);
        let p = softmax(scores.mask_fill(future, f64::NEG_INFINITY), 3);
        let weights = self.masked(p.clone()).reshape([batch, groups, rows, seq]);
        let out =
            self.merge(
                weights
                    .matmul(v.clone())
                    .reshape([batch, self.heads.queries, seq, width]),
            );
        let saved = vec![q, k, v, p]
            .into_iter()
            .map(Tensor::into_dispatch)
            .collect();
        (out.into_dispatch(), saved)
    }

    /// With `p` the probabilities and `m` the mask: `dv = (p m)^T do`, `dp = (do v^T) m`,
    /// `ds = p (dp - sum(dp p))`, `dq = ds k`, `dk = ds^T q`, the last two times the scale.
    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let mut saved = saved.into_iter().map(Tensor::<4>::from_dispatch);
        let (Some(q), Some(k), Some(v), Some(p)) =
            (saved.next(), saved.next(), saved.next(), saved.next())
        else {
            unreachable!("the forward saves four tensors")
        };
        let [batch, groups, rows, width] = q.dims();
        let shape = p.dims();
        let grouped = [batch, groups, rows, shape[3]];
        let out = self.heads_of(Tensor::<3>::from_dispatch(gradient), self.heads.queries);
        let out = out.reshape([batch, groups, rows, width]);

        let weights = self.masked(p.clone()).reshape(grouped);
        let dv = weights.swap_dims(2, 3).matmul(out.clone());
        let dp = self.masked(out.matmul(v.swap_dims(2, 3)).reshape(shape));
        let ds = (dp.clone() - (dp * p.clone()).sum_dim(3)) * p;
        let ds = ds.mul_scalar(self.scale()).reshape(grouped);
        let dq = ds
            .clone()
            .matmul(k)
            .reshape([batch, self.heads.queries, shape[3], width]);
        let dk = ds.swap_dims(2, 3).matmul(q);
        let (dq, dk) = match &self.rotary {
            Some(rotary) => (rotary.turn_back(dq), rotary.turn_back(dk)),
            None => (dq, dk),
        };
        let gradients = vec![self.merge(dq), self.merge(dk), self.merge(dv)];
        vec![Some(Tensor::cat(gradients, 2).into_dispatch())]
    }
}

impl Attend {
    fn scale(&self) -> f64 {
        1.0 / (self.heads.width as f64).sqrt()
    }

    fn masked(&self, p: Tensor<4>) -> Tensor<4> {
        match &self.mask {
            Some(mask) => p * mask.clone(),
            None => p,
        }
    }

    /// Queries, keys and values of the joint projection, the first two turned.
    fn split(&self, qkv: Tensor<3>) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
        let Heads {
            queries,
            groups,
            width,
        } = self.heads;
        let [batch, seq, _] = qkv.dims();
        let part = |first: usize, heads: usize| {
            self.heads_of(qkv.clone().narrow(2, first * width, heads * width), heads)
        };
        let (q, k) = (part(0, queries), part(queries, groups));
        let v = part(queries + groups, groups);
        let (q, k) = match &self.rotary {
            Some(rotary) => (rotary.turn(q), rotary.turn(k)),
            None => (q, k),
        };
        (
            q.reshape([batch, groups, queries / groups * seq, width]),
            k,
            v,
        )
    }

    /// `[batch, seq, heads * width]` to `[batch, heads, seq, width]`.
    fn heads_of(&self, x: Tensor<3>, heads: usize) -> Tensor<4> {
        let [batch, seq, _] = x.dims();
        x.reshape([batch, seq, heads, self.heads.width])
            .swap_dims(1, 2)
    }

    /// `[batch, heads, seq, width]` to `[batch, seq, heads * width]`.
    fn merge(&self, x: Tensor<4>) -> Tensor<3> {
        let [batch, heads, seq, width] = x.dims();
        x.swap_dims(1, 2).reshape([batch, seq, heads * width])
    }
}
