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
    /// The all-reduce between nodes.
    BetweenNodes(PendingTensor<1>, NodeGroups),
    /// The all-gather in the node.
    Gather(PendingTensor<1>),
    /// A reduce-scatter over the shard group, which an all-reduce over the replicas of the shard follows if there are
    /// some.
    ReduceScatter(PendingTensor<1>),
    /// A reduce-scatter of 16-bit values that are accumulated in f32, and the same.
    ReduceScatterWide(PendingReduceScatterInF32),
    /// The all-reduce of the shard over the replicas.
    OverReplicas(PendingTensor<1>),
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

/// Whether the reduction of a bucket consists of several collectives, over different groups.
pub(super) fn has_several_collectives(bucket: usize, plan: &ShardingPlan) -> bool {
    let groups = plan.groups(bucket);
    groups.nodes.is_some() || groups.shard.size() > 1 && groups.replicas.size() > 1
}

impl PendingReduction {
    /// Whether it is the first collective of several, among ranks that are near each other. It ends soon, and the next
    /// one should start then.
    pub fn is_first_of_several(&self, plan: &ShardingPlan) -> bool {
        match self.state {
            ReductionState::InNode(..) => true,
            ReductionState::ReduceScatter(_) | ReductionState::ReduceScatterWide(_) => {
                plan.groups(self.bucket).replicas.size() > 1
            }
            _ => false,
        }
    }

    /// Waits for its collective and starts the next one, if one follows. The memory of a reduce-scattered shard is counted
    /// as `category`. Collective: call on all ranks, in the same order.
    pub fn advanced(self, category: MemoryCategory, plan: &ShardingPlan) -> Self {
        let bucket = self.bucket;
        let replicas = &plan.groups(bucket).replicas;
        let start = |x| start_all_reduce(x, ReduceOp::Sum, replicas);
        let over_replicas = |shard: Tensor<1>, whole: TrackedAllocation| {
            drop(whole);
            let TrackedTensor { tensor, allocation } = plan.track(shard, category);
            let state = ReductionState::OverReplicas(start(tensor));
            Self {
                bucket,
                state,
                allocation,
            }
        };
        let several = replicas.size() > 1;
        let state = match self.state {
            ReductionState::InNode(part, nodes) => {
                let sum = start_all_reduce(part.wait(), ReduceOp::Sum, &nodes.inter_node);
                ReductionState::BetweenNodes(sum, nodes)
            }
            ReductionState::BetweenNodes(part, nodes) => {
                ReductionState::Gather(start_all_gather(part.wait(), 0, &nodes.intra_node))
            }
            ReductionState::ReduceScatter(shard) if several => {
                return over_replicas(shard.wait(), self.allocation);
            }
            ReductionState::ReduceScatterWide(shard) if several => {
                return over_replicas(shard.wait(), self.allocation);
            }
            last => last,
        };
        Self { state, ..self }
    }

    /// Waits for this rank's shard of the bucket, summed over its group. The memory of a reduce-scattered
    /// shard is counted as `category`. Collective: call on all ranks, in the same order, unless it is
    /// [advanced](Self::advanced) to its last collective.
    pub fn wait(self, category: MemoryCategory, plan: &ShardingPlan) -> TrackedTensor {
        let last = self.advanced(category, plan).advanced(category, plan);
        let shard = match last.state {
            ReductionState::Local(tensor) => {
                return TrackedTensor::from_parts(tensor, last.allocation);
            }
            ReductionState::AllReduce(pending) | ReductionState::Gather(pending) => {
                return TrackedTensor::from_parts(pending.wait(), last.allocation);
            }
            ReductionState::InNode(..) | ReductionState::BetweenNodes(..) => {
                unreachable!("a gather in the node is the last of three collectives")
            }
            ReductionState::ReduceScatter(pending) | ReductionState::OverReplicas(pending) => {
                pending.wait()
            }
            ReductionState::ReduceScatterWide(pending) => pending.wait(),
        };
        drop(last.allocation);
        plan.track(shard, category)
    }
}
