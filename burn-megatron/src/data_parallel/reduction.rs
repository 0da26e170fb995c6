//! Reduces gradient buckets over their data-parallel groups.

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use super::memory_usage::{MemoryCategory, TrackedAllocation, TrackedTensor};
use super::sharding_groups::ShardingGroups;
use super::sharding_plan::ShardingPlan;
use crate::collective::{
    PendingTensor, start_all_gather, start_all_reduce, start_all_reduce_coalesced,
    start_reduce_scatter_coalesced, start_reduce_scatter_in_f32,
};
use crate::comm::{NodeGroups, ReduceOp};

/// A reduction of one bucket in flight.
pub(super) struct PendingReduction {
    bucket: usize,
    state: ReductionState,
    /// The memory of the bucket.
    allocation: TrackedAllocation,
}

enum ReductionState {
    /// The last collective on the complete bucket: an all-reduce, or the all-gather within the node. Nothing is
    /// sent if the group has one rank.
    Whole(PendingTensor<1>),
    /// A reduce-scatter within the node. An all-reduce between nodes and an all-gather within the node follow.
    InNode(PendingTensor<1>, NodeGroups),
    /// The all-reduce between nodes.
    BetweenNodes(PendingTensor<1>, NodeGroups),
    /// A reduce-scatter over the shard group. If the shard has replicas, an all-reduce over them follows.
    ReduceScatter(PendingTensor<1>),
    /// The all-reduce of the shard over the replicas.
    OverReplicas(PendingTensor<1>),
}

/// Starts the reductions of consecutive buckets, in one call if they are reduced over the same group.
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
    let states: Vec<_> = match (groups.shard.size(), &groups.nodes) {
        (1, Some(nodes)) if groups.replicas.size() > 1 => {
            start_reduce_scatter_coalesced(tensors, &nodes.intra_node)
                .into_iter()
                .map(|pending| ReductionState::InNode(pending, nodes.clone()))
                .collect()
        }
        (1, _) => start_all_reduce_coalesced(tensors, ReduceOp::Sum, &groups.replicas)
            .into_iter()
            .map(ReductionState::Whole)
            .collect(),
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
    ReductionState::ReduceScatter(start_reduce_scatter_in_f32(small, &groups.shard))
}

/// Whether the reduction of a bucket consists of several collectives over different groups.
pub(super) fn has_several_collectives(bucket: usize, plan: &ShardingPlan) -> bool {
    let groups = plan.groups(bucket);
    groups.nodes.is_some() || groups.shard.size() > 1 && groups.replicas.size() > 1
}

impl PendingReduction {
    /// Whether the current collective is the first of several, and runs over ranks that are close to each other. Such a
    /// collective ends soon, and the next collective should then start.
    pub fn is_first_of_several(&self, plan: &ShardingPlan) -> bool {
        match self.state {
            ReductionState::InNode(..) => true,
            ReductionState::ReduceScatter(_) => plan.groups(self.bucket).replicas.size() > 1,
            _ => false,
        }
    }

    /// Waits for the current collective and starts the next one, if any. The memory of a reduce-scattered shard
    /// is counted as `category`. Collective: call on all ranks, in the same order.
    pub fn advanced(self, category: MemoryCategory, plan: &ShardingPlan) -> Self {
        let bucket = self.bucket;
        let replicas = &plan.groups(bucket).replicas;
        let state = match self.state {
            ReductionState::InNode(part, nodes) => {
                let sum = start_all_reduce(part.wait(), ReduceOp::Sum, &nodes.inter_node);
                ReductionState::BetweenNodes(sum, nodes)
            }
            ReductionState::BetweenNodes(part, nodes) => {
                ReductionState::Whole(start_all_gather(part.wait(), 0, &nodes.intra_node))
            }
            ReductionState::ReduceScatter(shard) if replicas.size() > 1 => {
                let shard = shard.wait();
                drop(self.allocation);
                let TrackedTensor { tensor, allocation } = plan.track(shard, category);
                let sum = start_all_reduce(tensor, ReduceOp::Sum, replicas);
                let state = ReductionState::OverReplicas(sum);
                return Self {
                    bucket,
                    state,
                    allocation,
                };
            }
            last => last,
        };
        Self { state, ..self }
    }

    /// Waits for this rank's shard of the bucket, summed over its group. The memory of a reduce-scattered shard
    /// is counted as `category`. Collective: call on all ranks, in the same order, unless the reduction has
    /// [advanced](Self::advanced) to its last collective.
    pub fn wait(self, category: MemoryCategory, plan: &ShardingPlan) -> TrackedTensor {
        let last = self.advanced(category, plan).advanced(category, plan);
        match last.state {
            ReductionState::Whole(pending) => TrackedTensor {
                tensor: pending.wait(),
                allocation: last.allocation,
            },
            ReductionState::InNode(..) | ReductionState::BetweenNodes(..) => {
                unreachable!("a gather in the node is the last of three collectives")
            }
            ReductionState::ReduceScatter(pending) | ReductionState::OverReplicas(pending) => {
                let shard = pending.wait();
                drop(last.allocation);
                plan.track(shard, category)
            }
        }
    }
}
