//! Segments of a rank's shards: those that the rank accounts for where each element of the model counts
//! once, and those that are replicated over some ranks of the tensor axis.

use std::ops::Range;

use burn::tensor::{Bool, Device, Tensor, TensorData};

use super::sharding_plan::ShardingPlan;
use crate::nn::{AxisRank, ParameterEntry, ParameterTable, Placement, Section};

/// The selected elements of a segment.
#[derive(Clone, Debug)]
pub(crate) enum ElementMask {
    None,
    All,
    /// True where an element is selected.
    Some(Tensor<1, Bool>),
}

/// A range of one parameter in this rank's shard of a bucket.
#[derive(Clone, Debug)]
pub(crate) struct ShardSegment {
    pub bucket: usize,
    /// The index of the parameter in the table.
    pub index: usize,
    /// Elements, from the start of the rank's shard.
    pub range: Range<usize>,
    pub mask: ElementMask,
}

/// The segments that this rank accounts for where each element of the model counts once: those of its
/// partition of each bucket, without what another rank of the tensor axis, or the first rank of the
/// pipeline, accounts for.
pub(super) fn unique_segments(
    plan: &ShardingPlan,
    table: &ParameterTable,
    place: AxisRank,
    is_first_stage: bool,
) -> Vec<ShardSegment> {
    let select = |entry: &ParameterEntry| {
        if entry.tied_across_pipeline && !is_first_stage {
            return SelectedElements::None;
        }
        match (&entry.placement, place.index) {
            (Placement::Replicated, 0) => SelectedElements::All,
            (Placement::Replicated, _) => SelectedElements::None,
            (Placement::Split { .. }, _) => {
                select_sections(entry, place, |section| section.is_first_replica(place))
            }
        }
    };
    let range = |number| plan.groups.partition_range(plan.elements(number));
    segments(plan, table, range, select)
}

/// The segments that are replicated over groups of `replicas` ranks of the tensor axis.
pub(super) fn segments_with_replicas(
    plan: &ShardingPlan,
    table: &ParameterTable,
    place: AxisRank,
    replicas: usize,
) -> Vec<ShardSegment> {
    let select = |entry: &ParameterEntry| {
        select_sections(entry, place, |section| {
            section.replicas(place.size) == replicas
        })
    };
    segments(plan, table, |number| plan.shard_range(number), select)
}

/// The segments of all parameters that satisfy `predicate`.
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

/// The segments in a range of each bucket that have selected elements.
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
                SelectedElements::None => ElementMask::None,
                SelectedElements::All => ElementMask::All,
                SelectedElements::Some(all) => {
                    element_mask(&all[slice.parameter_range], &plan.device)
                }
            };
            if !matches!(mask, ElementMask::None) {
                let range = before + slice.local_range.start..before + slice.local_range.end;
                found.push(ShardSegment {
                    bucket,
                    index: slice.index,
                    range,
                    mask,
                });
            }
        }
    }
    found
}

fn element_mask(elements: &[bool], device: &Device) -> ElementMask {
    match (elements.contains(&true), elements.contains(&false)) {
        (false, _) => ElementMask::None,
        (true, false) => ElementMask::All,
        (true, true) => {
            let data = TensorData::new(elements.to_vec(), [elements.len()]);
            ElementMask::Some(Tensor::from_data(data, device))
        }
    }
}

/// The elements of a split parameter that lie in the sections that satisfy `predicate`.
fn select_sections(
    entry: &ParameterEntry,
    place: AxisRank,
    predicate: impl Fn(&Section) -> bool,
) -> SelectedElements {
    let Placement::Split { dim, .. } = entry.placement else {
        return SelectedElements::None;
    };
    let local = entry.local_shape(place);
    let sections = entry.placement.local_sections(place);
    let is_selected = sections.iter().map(|(_, section)| predicate(section));
    if is_selected.clone().all(|selected| selected) {
        return SelectedElements::All;
    }
    if is_selected.clone().all(|selected| !selected) {
        return SelectedElements::None;
    }
    let outer: usize = local[..dim].iter().product();
    let inner: usize = local[dim + 1..].iter().product();
    let mut row = vec![false; local[dim] * inner];
    for ((range, _), selected) in sections.iter().zip(is_selected) {
        row[range.start * inner..range.end * inner].fill(selected);
    }
    SelectedElements::Some(row.repeat(outer))
}
