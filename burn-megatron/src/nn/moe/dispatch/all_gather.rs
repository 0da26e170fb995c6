//! Sends every token to every rank.

use burn::tensor::{Tensor, TensorData};
use burn_megatron_kernels::moe::permutation::{
    RowLayout, RowMap, permute, permute_weights, unpermute,
};

use super::{Dispatched, Dispatcher, ExpertRanks, Meanwhile, Routing};
use crate::collective::{gather_rows, reduce_scatter_rows};
use crate::nn::moe::experts::ExpertRows;
use crate::nn::moe::router::read;

/// The all-gather dispatcher: the sum over expert ranks adds the experts, that over expert-tensor ranks their parts.
#[derive(Debug)]
pub(super) struct AllGather {
    ranks: ExpertRanks,
}

/// Among the choices of a rank with fewer tokens than others; no rank has such an expert.
const NO_EXPERT: i64 = -1;

impl AllGather {
    pub fn new(ranks: ExpertRanks) -> Self {
        Self { ranks }
    }

    /// The choices of all ranks, as experts of this rank, and the number of tokens of each rank.
    fn gather(&self, mut own: Vec<i64>, k: usize) -> (Vec<i64>, Vec<usize>) {
        let lengths = self.ranks.gather(vec![own.len() as i64]).concat();
        let lengths: Vec<_> = lengths.into_iter().map(|len| len as usize).collect();
        let longest = lengths.iter().max().copied().unwrap_or(0);
        own.resize(longest, NO_EXPERT);
        let all = self.ranks.gather(own).into_iter().zip(&lengths);
        let choices = all.flat_map(|(choices, len)| choices.into_iter().take(*len));
        let first = self.ranks.first as i64;
        (
            choices.map(|expert| expert - first).collect(),
            lengths.iter().map(|len| len / k).collect(),
        )
    }
}

impl Dispatcher for AllGather {
    fn dispatch(&self, x: Tensor<2>, routing: &Routing, meanwhile: Meanwhile) -> Dispatched {
        let ([_, k], device) = (routing.weights.dims(), x.device());
        let (choices, tokens) = self.gather(read(routing.indices.clone()), k);
        let shape = [choices.len() / k, k];
        let choices = Tensor::from_data(TensorData::new(choices, shape), &device);
        let map = RowMap::new(choices, self.ranks.local, RowLayout::Kept);
        let comm = self.ranks.comm.clone();
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
