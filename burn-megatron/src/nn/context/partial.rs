//! Attention between some of the queries and some of the keys, and the merging of such partial results. The tensors are
//! not tracked by autodiff.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use burn_megatron_kernels::attention::{
    AttentionEngine, AttentionOptions, Heads, ProjectionGradients, attention_backward,
    attention_forward,
};
use burn_megatron_kernels::gradient::{FlatGradients, Place};

use super::shard::{Members, QueryPart, SequenceShard};
use crate::nn::score_options::ScoreOptions;
use crate::nn::wide::wide;

/// The alignment of value gradients in a flat buffer, in elements, as required by the kernels.
const ALIGNMENT: usize = 4;

/// Attention between the queries of one rank and blocks of keys and values.
///
/// Queries have the shape `[1, tokens, heads, width]`. A block has the shape `[tokens, 2 groups, width]`, with the keys
/// before the values. The tokens of queries and blocks are in ascending order.
#[derive(Clone, Debug)]
pub struct PartialAttention {
    pub(in crate::nn) engine: Arc<dyn AttentionEngine>,
    pub(in crate::nn) heads: Heads,
    pub(in crate::nn) scores: ScoreOptions,
    pub(in crate::nn) shard: Arc<SequenceShard>,
    /// The ranks that hold the tokens of the queries.
    pub(in crate::nn) queries: Members,
    /// Whether gradients of keys and values are exchanged in the dtype of the model.
    pub(in crate::nn) narrow_gradients: bool,
}

/// The result of attention over some of the keys: the output `[1, queries, heads, width]` in the dtype of the softmax
/// statistics, and the log-sum-exp `[1, heads, queries]` of the scores of these keys.
pub type PartialResult = (Tensor<4>, Tensor<3>);

/// The gradients of the queries and of a block, in the dtype of the softmax statistics. Each gradient has the shape of
/// its tensor.
pub type PartialGradients = (Tensor<4>, Tensor<3>);

impl PartialAttention {
    /// Returns the result of attention between the queries and `block`, or `None` if no query attends to a key of the
    /// block. `keys` are the ranks that own the tokens of the block.
    pub fn attend(&self, q: &Tensor<4>, block: &Tensor<3>, keys: Members) -> Option<PartialResult> {
        let options = self.options(keys, QueryPart::All, q)?;
        let [k, v] = self.keys_and_values(block);
        let (out, lse) = attention_forward(&*self.engine, q.clone(), k, v, None, &options);
        let dtype = wide(out.dtype());
        Some((out.cast(dtype), lse))
    }

    /// Returns the gradients of the queries and of `block` from the attention to this block, or `None` if no query
    /// attends to a key of the block. `keys` are the ranks that own the tokens of the block. `result` is the result
    /// merged from all blocks, with the output in the dtype of the queries.
    pub fn gradients(
        &self,
        q: &Tensor<4>,
        block: &Tensor<3>,
        keys: Members,
        result: &PartialResult,
        dout: &Tensor<4>,
    ) -> Option<PartialGradients> {
        self.gradients_of(QueryPart::All, q, block, keys, result, dout)
    }

    /// Returns the [`gradients`](Self::gradients) of a part of the queries. The gradients of the other queries are
    /// zero.
    pub(super) fn gradients_of(
        &self,
        part: QueryPart,
        q: &Tensor<4>,
        block: &Tensor<3>,
        keys: Members,
        result: &PartialResult,
        dout: &Tensor<4>,
    ) -> Option<PartialGradients> {
        let options = self.options(keys, part, q)?;
        let [k, v] = self.keys_and_values(block);
        let shape @ [tokens, _, width] = block.dims();
        let length = tokens * self.heads.groups * width;
        let pitch = length.next_multiple_of(ALIGNMENT);
        let dtype = wide(q.dtype());
        let sums = FlatGradients {
            flat: Tensor::empty([2 * pitch], (&q.device(), dtype)),
            places: [0, pitch].map(|offset| Place { offset, add: false }).into(),
        };
        let (q, result, dout) = (q.clone(), result.clone(), dout.clone());
        let gradients = attention_backward(
            &*self.engine,
            q,
            k,
            v,
            None,
            result,
            dout,
            &options,
            Some(sums),
        );
        let ProjectionGradients::Flat { dq, flat } = gradients.projections else {
            unreachable!("gradients go where they are told to")
        };
        let half = |offset| {
            let part = flat.clone().narrow(0, offset, length);
            part.reshape([tokens, self.heads.groups, width])
        };
        let block = Tensor::cat(vec![half(0), half(pitch)], 1);
        debug_assert_eq!(block.dims(), shape);
        Some((dq.cast(dtype), block))
    }

    /// Returns the dtype in which gradients of keys and values are exchanged, for a model in `dtype`.
    pub fn travelling(&self, dtype: DType) -> DType {
        if self.narrow_gradients {
            dtype
        } else {
            wide(dtype)
        }
    }

    /// Returns the attention options, or `None` if no query attends to a key.
    fn options(&self, keys: Members, part: QueryPart, q: &Tensor<4>) -> Option<AttentionOptions> {
        let members = (self.queries.clone(), keys);
        let ranges = self
            .shard
            .ranges(members, part, self.scores.window, &q.device());
        (!ranges.is_empty()).then(|| self.scores.of_ranges(ranges))
    }

    fn keys_and_values(&self, block: &Tensor<3>) -> [Tensor<4>; 2] {
        let groups = self.heads.groups;
        [0, groups].map(|first| block.clone().narrow(1, first, groups).unsqueeze::<4>())
    }
}

/// Returns the result of queries that attend to no key.
pub(super) fn unseen(q: &Tensor<4>) -> PartialResult {
    let [batch, queries, heads, width] = q.dims();
    let options = (&q.device(), wide(q.dtype()));
    (
        Tensor::zeros([batch, queries, heads, width], options),
        Tensor::full([batch, heads, queries], f64::NEG_INFINITY, options),
    )
}

/// Adds a sink `[heads]`, a logit without a value, to the softmax of each query.
pub(super) fn with_sink((out, lse): PartialResult, sink: Tensor<1>) -> PartialResult {
    let sink = sink.reshape([1, -1, 1]).expand(lse.dims());
    let difference = sink.clone() - lse.clone();
    let above_larger = difference.clone().abs().neg().exp().log1p();
    // The log-sum-exp grows by ln(1 + e^difference). The growth is infinite for a query that attends to no key.
    let growth = difference.clamp_min(0.0) + above_larger.clone();
    // [1, heads, queries] to [1, queries, heads, 1]
    let share = growth.neg().exp().swap_dims(1, 2);
    (
        out * share.unsqueeze_dim::<4>(3),
        lse.max_pair(sink) + above_larger,
    )
}

/// Returns the gradient of the sink of a result: the sum over the queries of `-exp(sink - lse) dout . out`.
pub(super) fn sink_gradient(
    sink: Tensor<1>,
    (out, lse): &PartialResult,
    dout: &Tensor<4>,
) -> Tensor<1> {
    let ([heads], dtype) = (sink.dims(), sink.dtype());
    let products = out.clone().cast::<DType>(dtype) * dout.clone().cast::<DType>(dtype);
    let products = products.sum_dim(3).squeeze_dim::<3>(3).swap_dims(1, 2);
    let shares = (sink.reshape([1, heads, 1]) - lse.clone()).exp();
    (shares * products).sum_dim(2).neg().reshape([heads])
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    /// Padding attends to nothing. Its softmax contains only the sink.
    #[test]
    fn a_query_that_sees_no_key_has_the_sink_alone() {
        let device = Device::flex();
        let options = (&device, DType::F64);
        let q = Tensor::<4>::ones([1, 3, 2, 4], options);
        let sink = Tensor::<1>::full([2], 0.5, options);
        let (out, lse) = with_sink(unseen(&q), sink.clone());
        assert_eq!(out.to_data().try_to_vec::<f64>().unwrap(), vec![0.0; 24]);
        assert_eq!(lse.to_data().try_to_vec::<f64>().unwrap(), vec![0.5; 6]);
        let gradient = sink_gradient(sink, &(out, lse), &q);
        assert_eq!(
            gradient.abs().to_data().try_to_vec::<f64>().unwrap(),
            vec![0.0; 2]
        );
    }
}
