//! Attention with its scores in memory, under context parallelism: each rank gathers all keys and values.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use burn_megatron_kernels::attention::{Heads, Window};
use burn_megatron_kernels::softmax::Mask;

use super::attention::ContextAttention;
use super::shard::SequenceShard;
use crate::collective;

/// The scores of one rank, before its softmax.
pub(in crate::nn) struct GatheredProjection {
    /// `[batch, queries, heads, width]`
    pub q: Tensor<4>,
    /// `[batch, seq, groups, width]`
    pub k: Tensor<4>,
    /// `[batch, seq, groups, width]`
    pub v: Tensor<4>,
    pub mask: Mask,
    /// The number of each row of `[batch, heads, queries]` among those of all ranks.
    pub rows: Vec<usize>,
    /// The rows of each sample.
    pub rows_per_sample: usize,
}

impl ContextAttention {
    /// `[batch, seq / context, (heads + 2 groups) * width]` to `[batch, seq / context, heads * width]`. `attend`
    /// returns `[batch, queries, heads * width]`. `first_head` of `all_heads` is the first one of this tensor rank.
    pub fn attend_unfused(
        &self,
        qkv: Tensor<3>,
        (heads, window): (Heads, Option<Window>),
        (first_head, all_heads): (usize, usize),
        shard: &Arc<SequenceShard>,
        attend: impl FnOnce(GatheredProjection) -> Tensor<3>,
    ) -> Tensor<3> {
        let [batch, seq] = shard.shape();
        self.with_own_heads(qkv, heads, shard, |qkv, heads| {
            let width = heads.width;
            let q = qkv.clone().narrow(1, 0, heads.heads);
            let block = qkv.narrow(1, heads.heads, 2 * heads.groups);
            let block = self.gathered(block, shard);
            let part = |first| {
                let part = block.clone().narrow(1, first, heads.groups);
                part.reshape([batch, seq, heads.groups, width])
            };
            let tokens = shard.of_members(&self.queries());
            let queries = tokens.len() / batch;
            let first_head = first_head + self.groups.inner.rank() * heads.heads;
            let row = |sample: usize, head: usize, query: usize| {
                let token = tokens[sample * queries + query] % seq;
                (sample * all_heads + first_head + head) * seq + token
            };
            let of_sample = |sample| {
                let of_head = move |head| (0..queries).map(move |query| row(sample, head, query));
                (0..heads.heads).flat_map(of_head)
            };
            let device = block.device().inner();
            let hidden: Vec<bool> = tokens
                .iter()
                .flat_map(|token| {
                    let row = token / seq * seq;
                    let seen = shard.visible(*token, window);
                    (row..row + seq).map(move |key| !seen.contains(&key))
                })
                .collect();
            let hidden = TensorData::new(hidden, [batch, 1, queries, seq]);
            let out = attend(GatheredProjection {
                q: q.reshape([batch, queries, heads.heads, width]),
                k: part(0),
                v: part(heads.groups),
                mask: Mask::Hidden(Tensor::from_data(hidden, &device)),
                rows: (0..batch).flat_map(of_sample).collect(),
                rows_per_sample: all_heads * seq,
            });
            out.reshape([batch * queries, heads.heads, width])
        })
    }

    /// The keys and values of all ranks in ascending order.
    fn gathered(&self, block: Tensor<3>, shard: &SequenceShard) -> Tensor<3> {
        let outer = &self.groups.outer;
        if outer.comm.size() == 1 {
            return block;
        }
        let order = shard.order(0..shard.ranks(), &block.device());
        let all = collective::gather_sequence(block, 0, &outer.comm);
        order.ascending(all)
    }
}
