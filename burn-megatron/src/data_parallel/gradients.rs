//! The gradients of one step, reduced and ready for the optimizer.

use std::collections::BTreeMap;

use burn::tensor::Tensor;
use burn_megatron_kernels::flat;

use super::coalesced_all_reduce::CoalescedAllReduce;
use super::gradient_check::InvalidGradient;
use super::memory_usage::TrackedTensor;
use super::segments::{ElementMask, ShardSegment, segments_where, segments_with_replicas};
use super::sharding_plan::ShardingPlan;
use crate::collective::Comm;
use crate::comm::{CommError, ParallelContext};
use crate::nn::{ParameterTable, Placement};

/// This rank's shards of the gradient buckets (the whole buckets, where gradients are not sharded).
///
/// Gradients are stored as sums over all tokens and one factor for all parameters, so that dividing,
/// unscaling and clipping change the factor only; the optimizer applies it when it reads the sums.
#[derive(Debug)]
pub struct Gradients {
    shards: Vec<TrackedTensor>,
    factor: f64,
    /// The tokens of all micro-batches on all ranks, by which the gradients are divided.
    pub tokens: u64,
    /// The invalid gradients that this rank found before the reduction.
    pub invalid_gradients: Vec<InvalidGradient>,
}

impl Gradients {
    pub(super) fn new(
        shards: Vec<TrackedTensor>,
        tokens: u64,
        invalid_gradients: Vec<InvalidGradient>,
    ) -> Self {
        Self {
            shards,
            factor: 1.0 / tokens.max(1) as f64,
            tokens,
            invalid_gradients,
        }
    }

    /// This rank's shard of each bucket, `[elements]`, as a sum over all tokens; multiply by
    /// [`factor`](Self::factor) for the gradient.
    pub fn sums(&self) -> impl Iterator<Item = &Tensor<1>> {
        self.shards.iter().map(|shard| &shard.tensor)
    }

    /// The factor by which to multiply the sums.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// The sums, for the optimizer, which may overwrite them.
    pub(super) fn into_sums(self) -> impl Iterator<Item = TrackedTensor> {
        self.shards.into_iter()
    }

    /// Multiplies every gradient by `factor`.
    pub fn scale(&mut self, factor: f64) {
        self.factor *= factor;
    }
}

/// The all-reduces over the model-parallel ranks, of the gradients that are partial sums there.
#[derive(Debug)]
pub(super) struct ModelParallelAllReduce {
    /// Over the tensor axis, between the first and the last pipeline rank, and over replica groups of the
    /// tensor axis, in this order on every rank.
    reductions: Vec<(Comm, Vec<ShardSegment>)>,
}

impl ModelParallelAllReduce {
    /// Creates the groups that `table` requires. Collective: call on all ranks of the tensor axis.
    pub fn new(
        plan: &ShardingPlan,
        table: &ParameterTable,
        groups: &ParallelContext,
    ) -> Result<Self, CommError> {
        let place = groups.place();
        let partial = segments_where(plan, table, |entry| entry.sum_over_tensor);
        let tied = segments_where(plan, table, |entry| entry.tied_across_pipeline);
        let mut reductions = vec![
            (groups.tensor().clone(), partial),
            (groups.embedding().clone(), tied),
        ];
        for (replicas, comm) in replica_groups(table, groups)? {
            reductions.push((comm, segments_with_replicas(plan, table, place, replicas)));
        }
        reductions.retain(|(comm, segments)| comm.size() > 1 && !segments.is_empty());
        Ok(Self { reductions })
    }

    /// Replaces each partial sum by the sum. Collective: call on all ranks.
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
        let nothing = Tensor::empty([0], (&values.device(), values.dtype()));
        let tensor = std::mem::replace(&mut shard.tensor, nothing);
        let values = match &self.mask {
            ElementMask::Some(mask) => {
                let current = tensor.clone().slice([self.range.clone()]);
                current.mask_where(mask.clone(), values)
            }
            ElementMask::All | ElementMask::None => values,
        };
        shard.tensor = flat::accumulate(tensor, self.range.start, values, false);
    }
}

/// The groups of tensor ranks that hold the same sections, by their size. Collective: call on all ranks of
/// the tensor axis.
pub(super) fn replica_groups(
    table: &ParameterTable,
    groups: &ParallelContext,
) -> Result<BTreeMap<usize, Comm>, CommError> {
    let ranks = groups.place().size;
    let mut sizes: Vec<usize> = table
        .entries()
        .iter()
        .flat_map(|entry| match &entry.placement {
            Placement::Replicated => vec![],
            Placement::Split { sections, .. } => sections
                .iter()
                .map(|section| section.replicas(ranks))
                .collect(),
        })
        .filter(|replicas| *replicas > 1)
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    let create = |size| Ok((size, groups.tensor_subgroups(size)?));
    sizes.into_iter().map(create).collect()
}
