//! The all-gather dispatcher, which sends every token to every rank.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::moe::permutation::{
    RowLayout, RowMap, permute, permute_weights, unpermute,
};

use super::dispatcher::{Dispatched, Dispatcher, PendingDispatch};
use super::ranks::ExpertRanks;
use crate::collective::{gather_rows, reduce_scatter_rows};
use crate::nn::moe::experts::ExpertRows;
use crate::nn::moe::router::Routing;

/// The all-gather dispatcher. The sum over expert ranks adds the results of all experts, and the sum over expert-tensor
/// ranks adds the parts of each result.
#[derive(Clone, Debug)]
pub(super) struct AllGather {
    ranks: Arc<ExpertRanks>,
}

impl AllGather {
    pub fn new(ranks: ExpertRanks) -> Self {
        let ranks = Arc::new(ranks);
        Self { ranks }
    }

    /// Returns the choices of all ranks, as indices of this rank's experts.
    fn choices(&self, own: Tensor<2, Int>, tokens: &[usize]) -> Tensor<2, Int> {
        // Expert indices are represented exactly in f32.
        let all = gather_rows(own.float(), tokens, &self.ranks.comm).int();
        all.sub_scalar(self.ranks.first as i64)
    }
}

impl Dispatcher for AllGather {
    fn start(&self, routing: &Routing) -> PendingDispatch {
        let [tokens, _] = routing.indices.dims();
        let counts = self.ranks.start_counts(vec![tokens as i64], 0..0);
        let (own, routing) = (self.clone(), routing.clone());
        PendingDispatch::new(move |x, exchanges| {
            let comm = own.ranks.comm.clone();
            let tokens = counts().concat().into_iter();
            let tokens: Vec<_> = tokens.map(|tokens| tokens as usize).collect();
            let choices = own.choices(routing.indices, &tokens);
            let map = RowMap::new(choices, own.ranks.local, RowLayout::Kept);
            let weights = gather_rows(routing.weights, &tokens, &comm);
            let rows = ExpertRows {
                rows: permute(gather_rows(x, &tokens, &comm), &map),
                weights: permute_weights(weights, &map),
                group_sizes: map.group_sizes(),
            };
            exchanges.run_meanwhile();
            Dispatched::new(rows, move |y, _| {
                reduce_scatter_rows(unpermute(y, &map), &tokens, &comm)
            })
        })
    }
}
