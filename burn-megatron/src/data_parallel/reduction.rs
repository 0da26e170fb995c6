//! The reduction of gradient buckets over their data-parallel groups.

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use super::memory_usage::{MemoryCategory, TrackedAllocation, TrackedTensor};
use super::sharding_groups::ShardingGroups;
use super::sharding_plan::ShardingPlan;
use crate::collective::{
    PendingReduceScatterInF32, PendingTensor, start_all_gather, start_all_reduce,
    start_all_reduce_coalesced, start_reduce_scatter_coalesced, start_reduce_scatter_in_f32,
};
use crate::comm::{NodeGroups, ReduceOp};

/// The reduction of one bucket, in flight.
pub(super) struct PendingReduction {
    bucket: usize,
    state: ReductionState,
    /// The memory of the bucket.
    allocation: TrackedAllocation,
}

enum ReductionState {
    /// The group has one rank; nothing is sent.
    Local(Tensor<1>),
    /// An all-reduce of the whole bucket.
    AllReduce(PendingTensor<1>),
    /// A reduce-scatter in the node, which an all-reduce between nodes and a gather in the node follow.
    InNode(PendingTensor<1>, NodeGroups),
    /// A reduce-scatter over the shard group.
    ReduceScatter(PendingTensor<1>),
    /// A reduce-scatter of 16-bit values that are accumulated in f32.
    ReduceScatterWide(PendingReduceScatterInF32),
}

/// Starts the reductions of consecutive buckets, in one call where they are reduced over the same group.
/// Collective: call on all ranks of the groups.
pub(super) fn start_reductions(
    buckets: Range<usize>,
    buffers: Vec<TrackedTensor>,
    plan: &ShardingPlan,
) -> Vec<PendingReduction> {
    let mut buffers = buffers.into_iter();
    let buckets: Vec<usize> = buckets.collect();
    let same_grid = |a: &usize, b: &usize| plan.grid(*a) == plan.grid(*b);
    let start = |run: &[usize]| start_run(run, buffers.by_ref().take(run.len()).collect(), plan);
    buckets.chunk_by(same_grid).flat_map(start).collect()
}

/// Starts the reductions of buckets of one grid in one call.
fn start_run(
    buckets: &[usize],
    buffers: Vec<TrackedTensor>,
    plan: &ShardingPlan,
) -> Vec<PendingReduction> {
    let (tensors, allocations): (Vec<_>, Vec<_>) = buffers
        .into_iter()
        .map(|TrackedTensor { tensor, allocation }| (tensor, allocation))
        .unzip();
    let groups = plan.groups(buckets[0]);
    let states: Vec<_> = match (groups.shard.size(), groups.replicas.size()) {
        (1, 1) => tensors.into_iter().map(ReductionState::Local).collect(),
        (1, _) => match &groups.nodes {
            Some(nodes) => start_reduce_scatter_coalesced(tensors, &nodes.intra_node)
                .into_iter()
                .map(|pending| ReductionState::InNode(pending, nodes.clone()))
                .collect(),
            None => start_all_reduce_coalesced(tensors, ReduceOp::Sum, &groups.replicas)
                .into_iter()
                .map(ReductionState::AllReduce)
                .collect(),
        },
        _ if plan.config.reduce_in_16_bits => {
            let start = |x| start_in_16_bits(x, groups, plan);
            tensors.into_iter().map(start).collect()
        }
        _ => start_reduce_scatter_coalesced(tensors, &groups.shard)
            .into_iter()
            .map(ReductionState::ReduceScatter)
            .collect(),
    };
    let states = buckets.iter().zip(states);
    let reduction = |((bucket, state), allocation): ((&usize, _), _)| PendingReduction {
        bucket: *bucket,
        state,
        allocation,
    };
    states.zip(allocations).map(reduction).collect()
}

fn start_in_16_bits(x: Tensor<1>, groups: &ShardingGroups, plan: &ShardingPlan) -> ReductionState {
    let model = plan.config.precision.of(DType::F32);
    let small = x.clone().cast(model);
    plan.recycle(x);
    ReductionState::ReduceScatterWide(start_reduce_scatter_in_f32(small, &groups.shard))
}

impl PendingReduction {
    /// Waits for this rank's shard of the bucket, summed over its group. The memory of a reduce-scattered
    /// shard is counted as `category`.
    pub fn wait(self, category: MemoryCategory, plan: &ShardingPlan) -> TrackedTensor {
        let shard = match self.state {
            ReductionState::Local(tensor) => {
                return TrackedTensor::from_parts(tensor, self.allocation);
            }
            ReductionState::AllReduce(pending) => {
                return TrackedTensor::from_parts(pending.wait(), self.allocation);
            }
            ReductionState::InNode(pending, nodes) => {
                let sum = summed_over_nodes(pending.wait(), &nodes);
                return TrackedTensor::from_parts(sum, self.allocation);
            }
            ReductionState::ReduceScatter(pending) => pending.wait(),
            ReductionState::ReduceScatterWide(pending) => pending.wait(),
        };
        drop(self.allocation);
        let replicas = &plan.groups(self.bucket).replicas;
        let reduced = match replicas.size() {
            1 => shard,
            _ => start_all_reduce(shard, ReduceOp::Sum, replicas).wait(),
        };
        plan.track(reduced, category)
    }
}

/// The sum of a bucket over all nodes, from this rank's part of that of its node.
fn summed_over_nodes(part: Tensor<1>, nodes: &NodeGroups) -> Tensor<1> {
    let sum = start_all_reduce(part, ReduceOp::Sum, &nodes.inter_node).wait();
    start_all_gather(sum, 0, &nodes.intra_node).wait()
}
