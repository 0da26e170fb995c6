//! The reduced gradients of one step, which are the input of the optimizer.

use burn::tensor::Tensor;

use super::coalesced_all_reduce::CoalescedAllReduce;
use super::gradient_check::InvalidGradient;
use super::memory_usage::TrackedTensor;
use super::replica_groups::{axis_sets, replica_groups};
use super::segments::{ShardSegment, segments_where, segments_with_replicas};
use super::sharding_plan::ShardingPlan;
use crate::collective::Comm;
use crate::comm::{CommError, ParallelContext};
use crate::nn::{ParameterEntry, ParameterTable};

/// The reduced gradients of one step on this rank: the rank's shards of the gradient buckets, or the complete buckets
/// if gradients are not sharded.
///
/// Gradients are stored as sums over all tokens, together with one common factor. Division by the number of tokens,
/// unscaling and clipping only change the factor. The optimizer applies the factor when it reads the sums.
#[derive(Debug)]
pub struct Gradients {
    shards: Vec<TrackedTensor>,
    factor: f64,
    /// The number of tokens of all micro-batches on all ranks. The gradients are divided by this number.
    pub tokens: u64,
    /// The invalid gradients that this rank found before the gradients were reduced.
    pub invalid_gradients: Vec<InvalidGradient>,
}

/// The measurements and fingerprints of the gradient reduction of a step on one rank.
pub struct ReductionRecord {
    /// The result of the gradient check, if the check is enabled: a tensor `[1 + parameters]` on the device. The first
    /// element is the largest sum of squares of a bucket.
    pub measured: Option<Tensor<1>>,
    /// Hashes of the order in which buckets were gathered and reduced. With ZeRO-2 and ZeRO-3 they must be equal on all
    /// ranks of the data axis.
    pub fingerprints: [u64; 2],
}

impl Gradients {
    pub(super) fn unscaled(shards: Vec<TrackedTensor>) -> Self {
        Self {
            shards,
            factor: 1.0,
            tokens: 0,
            invalid_gradients: vec![],
        }
    }

    /// Returns this rank's shard of each gradient bucket, `[elements]`, as a sum over all tokens. Multiply the sums by
    /// [`factor`](Self::factor) to get the gradients.
    pub fn sums(&self) -> impl Iterator<Item = &Tensor<1>> {
        self.shards.iter().map(|shard| &shard.tensor)
    }

    /// Returns the common factor of all gradients: the gradients are the [sums](Self::sums) times this factor.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Returns the sums for the optimizer, which may overwrite them.
    pub(super) fn into_sums(self) -> impl Iterator<Item = TrackedTensor> {
        self.shards.into_iter()
    }

    /// Multiplies every gradient by `factor`.
    pub fn scale(&mut self, factor: f64) {
        self.factor *= factor;
    }
}

/// The all-reduces over the model-parallel ranks for the gradients that are partial sums on these ranks.
#[derive(Debug)]
pub(super) struct ModelParallelAllReduce {
    /// The reductions over sets of model axes, between the copies of the pipeline, and over replicas of
    /// sections. They have the same order on every rank.
    reductions: Vec<(Comm, Vec<ShardSegment>)>,
}

impl ModelParallelAllReduce {
    /// Creates the groups that `table` requires. Collective: call on all ranks of the stage.
    pub fn new(
        plan: &ShardingPlan,
        table: &ParameterTable,
        groups: &ParallelContext,
    ) -> Result<Self, CommError> {
        let mut reductions = vec![];
        for (grid, axes) in axis_sets(table, |entry| entry.summed_model_axes()) {
            let partial = segments_where(plan, table, |entry| {
                (entry.grid, entry.summed_model_axes()) == (grid, axes)
            });
            reductions.push((groups.group(grid, axes)?, partial));
        }
        let tied = segments_where(plan, table, ParameterEntry::is_tied);
        reductions.push((groups.embedding().clone(), tied));
        for (replicas, comm) in replica_groups(table, groups)? {
            let shared = segments_with_replicas(plan, table, groups.mesh_rank(), replicas);
            reductions.push((comm, shared));
        }
        reductions.retain(|(comm, segments)| comm.size() > 1 && !segments.is_empty());
        Ok(Self { reductions })
    }

    /// Whether there are no reductions.
    pub fn is_empty(&self) -> bool {
        self.reductions.is_empty()
    }

    /// Replaces each partial sum by the total sum. Collective: call on all ranks.
    pub fn apply(&self, shards: &mut [TrackedTensor]) {
        for (comm, segments) in &self.reductions {
            let partial_sum = |(number, segment): (usize, &ShardSegment)| {
                let shard = shards[segment.bucket].tensor.clone();
                (number, shard.slice([segment.range.clone()]))
            };
            let partial_sums = segments.iter().enumerate().map(partial_sum).collect();
            CoalescedAllReduce::start(partial_sums, comm).finish(|number, sum| {
                let segment = &segments[number];
                segment.write(&mut shards[segment.bucket], sum);
            });
        }
    }
}

impl ShardSegment {
    /// Overwrites the selected elements of this segment.
    fn write(&self, shard: &mut TrackedTensor, values: Tensor<1>) {
        let values = match &self.mask {
            Some(mask) => {
                let current = shard.tensor.clone().slice([self.range.clone()]);
                current.mask_where(mask.clone(), values)
            }
            None => values,
        };
        shard.overwrite(self.range.start, values);
    }
}
