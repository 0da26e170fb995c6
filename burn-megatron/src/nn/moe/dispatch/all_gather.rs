//! Sends every token to every rank.

use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::moe::permutation::{
    RowLayout, RowMap, permute, permute_weights, unpermute,
};

use super::{Dispatched, Dispatcher, ExpertRanks, Meanwhile, Routing};
use crate::collective::{gather_rows, reduce_scatter_rows};
use crate::nn::moe::experts::ExpertRows;

/// The all-gather dispatcher: the sum over expert ranks adds the experts, that over expert-tensor ranks their parts.
#[derive(Debug)]
pub(super) struct AllGather {
    ranks: ExpertRanks,
}

impl AllGather {
    pub fn new(ranks: ExpertRanks) -> Self {
        Self { ranks }
    }

    /// The choices of all ranks, as experts of this rank.
    fn choices(&self, own: Tensor<2, Int>, tokens: &[usize]) -> Tensor<2, Int> {
        // In f32, which is exact for so few experts.
        let all = gather_rows(own.float(), tokens, &self.ranks.comm).int();
        all.sub_scalar(self.ranks.first as i64)
    }
}

impl Dispatcher for AllGather {
    fn dispatch(&self, x: Tensor<2>, routing: &Routing, meanwhile: Meanwhile) -> Dispatched {
        let comm = self.ranks.comm.clone();
        let tokens = self.ranks.gather(vec![x.dims()[0] as i64]).concat();
        let tokens: Vec<_> = tokens.into_iter().map(|tokens| tokens as usize).collect();
        let choices = self.choices(routing.indices.clone(), &tokens);
        let map = RowMap::new(choices, self.ranks.local, RowLayout::Kept);
        let weights = gather_rows(routing.weights.clone(), &tokens, &comm);
        let rows = ExpertRows {
            rows: permute(gather_rows(x, &tokens, &comm), &map),
            weights: permute_weights(weights, &map),
            group_sizes: map.group_sizes(),
        };
        meanwhile();
        Dispatched::new(rows, move |y| {
            reduce_scatter_rows(unpermute(y, &map), &tokens, &comm)
        })
    }
}
