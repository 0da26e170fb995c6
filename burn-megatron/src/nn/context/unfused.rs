//! Unfused attention under context parallelism: each rank gathers all keys and values.

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use burn_megatron_kernels::attention::{Heads, Window};
use burn_megatron_kernels::softmax::Mask;

use super::attention::ContextAttention;
use super::shard::SequenceShard;
use crate::nn::dropout::MaskRows;

/// The rows of scores that a rank computes.
pub(in crate::nn) struct QueryRows<'a> {
    pub shard: &'a SequenceShard,
    /// The token indices of the queries. Each sample has the same number of queries.
    pub tokens: Vec<usize>,
    /// The number of heads of this rank.
    pub heads: usize,
    /// The index of the first head of this rank among the heads of all ranks.
    pub first_head: usize,
    pub all_heads: usize,
}

impl QueryRows<'_> {
    /// Returns the attention mask. For each query, the mask hides the keys of the same sample that the query does not
    /// attend to.
    pub fn mask(&self, window: Option<Window>, device: &Device) -> Mask {
        let [batch, seq] = self.shard.shape();
        let hidden = self.tokens.iter().flat_map(|token| {
            let row = token / seq * seq;
            let seen = self.shard.visible(*token, window);
            (row..row + seq).map(move |key| !seen.contains(&key))
        });
        let shape = [batch, 1, self.tokens.len() / batch, seq];
        let hidden = TensorData::new(hidden.collect::<Vec<_>>(), shape);
        Mask::Hidden(Tensor::from_data(hidden, &device.clone().inner()))
    }

    /// Returns the indices of the dropout random numbers for the rows `[batch, heads, queries]` of the probabilities.
    /// The random numbers are indexed as in the probabilities before padding, `[batch, heads, seq, seq]`. Padding moves
    /// a document to later token indices, and a query uses random numbers only for the keys of its document.
    pub fn draws(&self) -> MaskRows {
        let (shard, seq) = (self.shard, self.shard.row_of_places());
        let [batch, padded] = shard.shape();
        let queries = self.tokens.len() / batch;
        let mut starts = Vec::with_capacity(self.heads * self.tokens.len());
        for sample in 0..batch {
            let tokens = &self.tokens[sample * queries..][..queries];
            for head in self.first_head..self.first_head + self.heads {
                let first = (sample * self.all_heads + head) * seq;
                starts.extend(tokens.iter().map(|token| {
                    let document = shard.document(*token).start;
                    let row = first + shard.place(*token)? % seq;
                    // The number of keys by which padding moves the document.
                    let moved = document % padded - shard.place(document)? % seq;
                    Some((row * seq - moved) as u64)
                }));
            }
        }
        MaskRows {
            starts,
            per_sample: (self.all_heads * seq * seq) as u64,
        }
    }
}

impl ContextAttention {
    /// Applies unfused attention to `[batch, seq / context, (heads + 2 * groups) * width]`. Returns
    /// `[batch, seq / context, heads * width]`.
    ///
    /// `attend` gets the queries `[batch, queries, heads, width]`, the keys and the values
    /// `[batch, seq, groups, width]`, the mask, and the indices of the dropout random numbers for the rows
    /// `[batch, heads, queries]`. It returns `[batch, queries, heads * width]`. `first_head` of `all_heads` is the
    /// first head of this tensor rank.
    pub fn attend_unfused(
        &self,
        qkv: Tensor<3>,
        (heads, window): (Heads, Option<Window>),
        (first_head, all_heads): (usize, usize),
        shard: &Arc<SequenceShard>,
        attend: impl FnOnce([Tensor<4>; 3], &Mask, MaskRows) -> Tensor<3>,
    ) -> Tensor<3> {
        let [batch, seq] = shard.shape();
        self.with_own_heads(qkv, heads, shard, |qkv, heads| {
            let width = heads.width;
            let q = qkv.clone().narrow(1, 0, heads.heads);
            let block = qkv.narrow(1, heads.heads, 2 * heads.groups);
            let outer = &self.groups.outer.comm;
            let block = match outer.size() {
                1 => block,
                _ => shard.gathered(block, outer),
            };
            let part = |first| {
                let part = block.clone().narrow(1, first, heads.groups);
                part.reshape([batch, seq, heads.groups, width])
            };
            let tokens = shard.of_members(&self.queries());
            let queries = tokens.len() / batch;
            let rows = QueryRows {
                shard,
                tokens,
                heads: heads.heads,
                first_head: first_head + self.groups.inner.rank() * heads.heads,
                all_heads,
            };
            let q = q.reshape([batch, queries, heads.heads, width]);
            let mask = rows.mask(window, &block.device());
            let out = attend([q, part(0), part(heads.groups)], &mask, rows.draws());
            out.reshape([batch * queries, heads.heads, width])
        })
    }
}
