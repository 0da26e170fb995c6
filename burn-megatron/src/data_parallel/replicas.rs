//! Compares replicated parameters.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::error::DataParallelError;
use super::param_and_grad_buffers::ParamAndGradBuffers;
use super::replica_groups::{axis_sets, replica_groups};
use super::segments::{ShardSegment, segments_where, segments_with_replicas};
use crate::collective::{Comm, to_buffer};
use crate::comm::{Buffer, ParallelContext};
use crate::nn::{ParameterEntry, ParameterTable};

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

/// Compares the selected elements of segments over the ranks of `comm`. Collective: call on all ranks of
/// `comm`.
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
    // All ranks compare with the first rank, so that they all return the same result.
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
        Some(mask) => values.mask_fill(mask.clone().bool_not(), 0.0),
        None => values,
    };
    let mut hasher = DefaultHasher::new();
    match to_buffer(selected) {
        Buffer::F64(values) => values.iter().for_each(|x| x.to_bits().hash(&mut hasher)),
        Buffer::F32(values) => values.iter().for_each(|x| x.to_bits().hash(&mut hasher)),
        other => unreachable!("main dtype {}: expected f32 or f64", other.dtype()),
    }
    hasher.finish() as i64
}
