//! The comparison of replicated parameters, and gradients from given values.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::Tensor;
use burn_megatron_kernels::flat;

use super::DataParallelError;
use super::gradients::{Gradients, axis_sets, replica_groups};
use super::memory_usage::MemoryCategory;
use super::param_and_grad_buffers::ParamAndGradBuffers;
use super::segments::{ElementMask, ShardSegment, segments_where, segments_with_replicas};
use super::sharding_plan::ShardingPlan;
use crate::collective::{Comm, to_buffer};
use crate::comm::{Buffer, ParallelContext};
use crate::nn::{ParameterEntry, ParameterTable};

/// This rank's gradient shards, from gradients that are replicated over the data axis.
pub(super) fn gradients_of(
    plan: &ShardingPlan,
    parts: Vec<Tensor<1>>,
    tokens: u64,
) -> Result<Gradients, DataParallelError> {
    for (part, parameter) in parts.iter().zip(&plan.parameters) {
        let (found, expected) = (part.dims()[0], parameter.shape.iter().product());
        if found != expected {
            let path = parameter.path.clone();
            return Err(DataParallelError::ElementCount {
                path,
                found,
                expected,
            });
        }
    }
    if parts.len() != plan.parameters.len() {
        return Err(DataParallelError::ElementCount {
            path: "the list of parameters".into(),
            found: parts.len(),
            expected: plan.parameters.len(),
        });
    }
    let shard = |number: usize| {
        let (_, main) = plan.model_and_main_dtypes(number);
        let mut shard = plan.zeros(plan.shard_range(number).len(), main);
        for slice in plan.shard_slices(number) {
            let values = parts[slice.index].clone().slice([slice.parameter_range]);
            shard = flat::accumulate(shard, slice.local_range.start, values.cast(main), false);
        }
        plan.track(shard, MemoryCategory::Gradients)
    };
    let shards = (0..plan.buckets()).map(shard).collect();
    let mut gradients = Gradients::unscaled(shards);
    gradients.tokens = tokens;
    gradients.scale(1.0 / tokens.max(1) as f64);
    Ok(gradients)
}

/// Compares replicated parameters bit by bit. Collective: call on all ranks of the stage.
pub(super) fn check(
    buffers: &ParamAndGradBuffers,
    table: &ParameterTable,
    groups: &ParallelContext,
) -> Result<(), DataParallelError> {
    let plan = &buffers.plan;
    for (grid, groups) in plan.all_groups() {
        let of_grid = segments_where(plan, table, |entry| entry.grid == grid);
        compare(buffers, &of_grid, &groups.replicas)?;
    }
    for (grid, axes) in axis_sets(table, ParameterEntry::replicated_model_axes) {
        let replicated = segments_where(plan, table, |entry| {
            (entry.grid, entry.replicated_model_axes()) == (grid, axes)
        });
        compare(buffers, &replicated, &groups.group(grid, axes)?)?;
    }
    let tied = segments_where(plan, table, ParameterEntry::is_tied);
    compare(buffers, &tied, groups.embedding())?;
    for (replicas, comm) in replica_groups(table, groups)? {
        let shared = segments_with_replicas(plan, table, groups.mesh_rank(), replicas);
        compare(buffers, &shared, &comm)?;
    }
    Ok(())
}

/// Compares the selected elements of segments over the ranks of `comm`. Collective: call on all its ranks.
fn compare(
    buffers: &ParamAndGradBuffers,
    segments: &[ShardSegment],
    comm: &Comm,
) -> Result<(), DataParallelError> {
    if comm.size() == 1 {
        return Ok(());
    }
    let own: Vec<i64> = segments
        .iter()
        .map(|segment| hash(buffers, segment))
        .collect();
    let all: Vec<i64> = comm.all_gather(own.clone().into())?.into_vec();
    if own.is_empty() {
        return Ok(());
    }
    let ranks = comm.group().ranks();
    // All ranks compare with the first one, so that all return the same result.
    let first = &all[..own.len()];
    for (rank, other) in ranks.iter().zip(all.chunks(own.len())) {
        if let Some(differing) = other.iter().zip(first).position(|(a, b)| a != b) {
            let index = segments[differing].index;
            return Err(DataParallelError::ReplicaMismatch {
                path: buffers.plan.parameters[index].path.clone(),
                ranks: [ranks[0], *rank],
            });
        }
    }
    Ok(())
}

fn hash(buffers: &ParamAndGradBuffers, segment: &ShardSegment) -> i64 {
    let shard = buffers.master_on_device(segment.bucket);
    let values = shard.slice([segment.range.clone()]);
    let selected = match &segment.mask {
        ElementMask::Some(mask) => values.mask_fill(mask.clone().bool_not(), 0.0),
        ElementMask::All | ElementMask::None => values,
    };
    let mut hasher = DefaultHasher::new();
    match to_buffer(selected) {
        Buffer::F64(values) => values.iter().for_each(|x| x.to_bits().hash(&mut hasher)),
        Buffer::F32(values) => values.iter().for_each(|x| x.to_bits().hash(&mut hasher)),
        other => unreachable!("main dtype {}: expected f32 or f64", other.dtype()),
    }
    hasher.finish() as i64
}
