//! Segments: ranges of parameters in a rank's shards. A rank counts only the elements of its unique segments, so that
//! each element of the model is counted once. The elements of replicated segments are also held by other ranks of an
//! axis.

use std::ops::Range;

use burn::tensor::{Bool, Tensor, TensorData};

use super::replica_groups::SectionReplicas;
use super::sharding_plan::ShardingPlan;
use crate::mesh::Axis;
use crate::nn::{MeshRank, ParameterEntry, ParameterTable, Section};

/// A range of one parameter in this rank's shard of a bucket.
#[derive(Clone, Debug)]
pub(crate) struct ShardSegment {
    pub bucket: usize,
    /// The index of the parameter in the parameter table.
    pub index: usize,
    /// The range of elements, relative to the start of the rank's shard.
    pub range: Range<usize>,
    /// A mask that is true for the selected elements of the range; `None` if all elements are selected.
    pub mask: Option<Tensor<1, Bool>>,
}

/// Returns the segments whose elements `rank` counts. Each element of the model is counted by one rank. The segments
/// are the segments of the rank's partition of each bucket, without the elements that another rank of a model axis or
/// of the pipeline counts.
pub(super) fn unique_segments(
    plan: &ShardingPlan,
    table: &ParameterTable,
    rank: &MeshRank,
) -> Vec<ShardSegment> {
    let select = |entry: &ParameterEntry| {
        if !entry.counts_on(rank) {
            return SelectedElements::None;
        }
        select_sections(entry, rank, |axis, section| {
            section.is_first_replica(rank.on(entry.grid, axis))
        })
    };
    let range = |number| plan.groups(number).partition_range(plan.elements(number));
    segments(plan, table, range, select)
}

/// Returns the segments of the sections that are replicated as described by `replicas`.
pub(super) fn segments_with_replicas(
    plan: &ShardingPlan,
    table: &ParameterTable,
    rank: &MeshRank,
    replicas: SectionReplicas,
) -> Vec<ShardSegment> {
    let SectionReplicas { grid, axis, ranks } = replicas;
    let size = rank.on(grid, axis).size;
    let select = |entry: &ParameterEntry| {
        if entry.grid != grid || entry.is_replicated_over(axis) {
            return SelectedElements::None;
        }
        select_sections(entry, rank, |other, section| {
            other != axis || section.replicas(size) == ranks
        })
    };
    segments(plan, table, |number| plan.shard_range(number), select)
}

/// Returns the segments of all parameters that satisfy `predicate`.
pub(super) fn segments_where(
    plan: &ShardingPlan,
    table: &ParameterTable,
    predicate: impl Fn(&ParameterEntry) -> bool,
) -> Vec<ShardSegment> {
    let select = |entry: &ParameterEntry| {
        if predicate(entry) {
            SelectedElements::All
        } else {
            SelectedElements::None
        }
    };
    segments(plan, table, |number| plan.shard_range(number), select)
}

/// The selected elements of a parameter.
enum SelectedElements {
    None,
    All,
    Some(Vec<bool>),
}

/// Returns the segments in a range of each bucket that have selected elements.
fn segments(
    plan: &ShardingPlan,
    table: &ParameterTable,
    range: impl Fn(usize) -> Range<usize>,
    select: impl Fn(&ParameterEntry) -> SelectedElements,
) -> Vec<ShardSegment> {
    let mut found = vec![];
    for bucket in 0..plan.buckets() {
        let range = range(bucket);
        let before = range.start - plan.shard_range(bucket).start;
        for slice in plan.layout.bucket(bucket).slices(range) {
            let mask = match select(&table.entries()[slice.index]) {
                SelectedElements::None => continue,
                SelectedElements::All => None,
                SelectedElements::Some(all) => {
                    let own = &all[slice.parameter_range];
                    if !own.contains(&true) {
                        continue;
                    }
                    let data = || TensorData::new(own.to_vec(), [own.len()]);
                    let mask = || Tensor::from_data(data(), &plan.device);
                    own.contains(&false).then(mask)
                }
            };
            found.push(ShardSegment {
                bucket,
                index: slice.index,
                range: before + slice.local_range.start..before + slice.local_range.end,
                mask,
            });
        }
    }
    found
}

/// Selects the elements of a parameter in sections that satisfy `predicate`, on each axis that splits the
/// parameter.
fn select_sections(
    entry: &ParameterEntry,
    rank: &MeshRank,
    predicate: impl Fn(Axis, &Section) -> bool,
) -> SelectedElements {
    let local = entry.local_shape(rank);
    let mut by_dim: Vec<_> = local.iter().map(|size| vec![true; *size]).collect();
    let mut is_whole = true;
    for (axis, dim, sections) in entry.placements.splits() {
        let is_selected: Vec<_> = sections.iter().map(|s| predicate(axis, s)).collect();
        if !is_selected.contains(&true) {
            return SelectedElements::None;
        }
        is_whole &= !is_selected.contains(&false);
        let sections = entry.placements.on(axis);
        let sections = sections.local_sections(rank.on(entry.grid, axis));
        for (section, selected) in sections.into_iter().zip(is_selected) {
            by_dim[dim][section.local].fill(selected);
        }
    }
    if is_whole {
        return SelectedElements::All;
    }
    let product = |rows: Vec<bool>, dim: Vec<bool>| {
        let row = |selected: bool| dim.iter().map(move |inner| selected && *inner);
        rows.into_iter().flat_map(row).collect()
    };
    SelectedElements::Some(by_dim.into_iter().fold(vec![true], product))
}
