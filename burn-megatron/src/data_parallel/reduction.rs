//! The sum of buckets over the ranks of the data axis.

use burn::tensor::{DType, Tensor};

use super::plan::Plan;
use super::usage::{Category, Flat, Holding};
use crate::collective::{
    PendingTensor, PendingWide, start_all_reduce, start_all_reduces, start_reduce_scatter_wide,
    start_reduce_scatters,
};
use crate::comm::ReduceOp;

/// A sum that is under way.
pub(super) struct Reduction {
    state: State,
    /// The bytes of the bucket.
    held: Holding,
}

enum State {
    /// There is no other rank.
    Ready(Tensor<1>),
    /// The whole bucket.
    Whole(PendingTensor<1>),
    /// This rank's shard, over the ranks that share a copy.
    Shard(PendingTensor<1>),
    /// The same from values that travel in 16 bits.
    Wide(PendingWide),
}

/// Starts summing buckets, those of one kind in one call.
pub(super) fn start(flats: Vec<Flat>, plan: &Plan) -> Vec<Reduction> {
    let (tensors, held): (Vec<_>, Vec<_>) = flats
        .into_iter()
        .map(|Flat { tensor, held }| (tensor, held))
        .unzip();
    let axes = &plan.axes;
    let states: Vec<_> = match (axes.shard.size(), axes.replicas.size()) {
        (1, 1) => tensors.into_iter().map(State::Ready).collect(),
        (1, _) => start_all_reduces(tensors, ReduceOp::Sum, &axes.replicas)
            .into_iter()
            .map(State::Whole)
            .collect(),
        _ => match plan.config.reduce_in_16_bits {
            true => tensors.into_iter().map(|x| narrow(x, plan)).collect(),
            false => start_reduce_scatters(tensors, &axes.shard)
                .into_iter()
                .map(State::Shard)
                .collect(),
        },
    };
    let reduction = |(state, held)| Reduction { state, held };
    states.into_iter().zip(held).map(reduction).collect()
}

fn narrow(x: Tensor<1>, plan: &Plan) -> State {
    let model = plan.config.precision.of(DType::F32);
    let small = x.clone().cast(model);
    plan.recycle(x);
    State::Wide(start_reduce_scatter_wide(small, &plan.axes.shard))
}

impl Reduction {
    /// What this rank steps of the bucket, summed over the data axis; a shard counts as `category`.
    pub fn wait(self, category: Category, plan: &Plan) -> Flat {
        let shard = match self.state {
            State::Ready(tensor) => return Flat::holding(tensor, self.held),
            State::Whole(pending) => return Flat::holding(pending.wait(), self.held),
            State::Shard(pending) => pending.wait(),
            State::Wide(pending) => pending.wait(),
        };
        drop(self.held);
        let replicas = &plan.axes.replicas;
        let shard = match replicas.size() {
            1 => shard,
            _ => start_all_reduce(shard, ReduceOp::Sum, replicas).wait(),
        };
        plan.hold(shard, category)
    }
}
