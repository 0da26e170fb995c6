//! Which elements of a rank's gradients are counted where each element of the model is to be counted
//! once, and which are summed over neighbours on the tensor axis.

use std::ops::Range;

use burn::tensor::{Bool, Device, Tensor, TensorData};

use super::plan::Plan;
use crate::nn::{ParameterEntry, ParameterTable, Place, Placement, Section};

/// Which elements of a stretch are meant.
#[derive(Clone, Debug)]
pub(crate) enum Chosen {
    None,
    All,
    /// True where an element is meant.
    Some(Tensor<1, Bool>),
}

/// A stretch of what this rank steps of a bucket.
#[derive(Clone, Debug)]
pub(crate) struct Stretch {
    pub bucket: usize,
    /// The parameter.
    pub index: usize,
    /// From the start of what the rank steps.
    pub range: Range<usize>,
    pub chosen: Chosen,
}

/// The stretches that this rank counts: those of its part of each bucket, but for what another rank
/// of the tensor axis, or the other end of the pipeline, counts.
pub(super) fn counted(
    plan: &Plan,
    table: &ParameterTable,
    place: Place,
    first: bool,
) -> Vec<Stretch> {
    let counts = |entry: &ParameterEntry| match (&entry.placement, entry.at_both_ends && !first) {
        (_, true) => Elements::None,
        (Placement::Replicated, _) => match place.index {
            0 => Elements::All,
            _ => Elements::None,
        },
        (Placement::Split { .. }, _) => {
            chosen_sections(entry, place, |section| section.is_first_replica(place))
        }
    };
    let range = |number| plan.axes.counted(plan.elements(number));
    stretches(plan, table, range, counts)
}

/// The stretches that `replicas` neighbours hold together.
pub(super) fn held_together(
    plan: &Plan,
    table: &ParameterTable,
    place: Place,
    replicas: usize,
) -> Vec<Stretch> {
    let shared = |entry: &ParameterEntry| {
        chosen_sections(entry, place, |section| {
            section.replicas(place.size) == replicas
        })
    };
    stretches(plan, table, |number| plan.own(number), shared)
}

/// Every stretch of the parameters for which `of` says so.
pub(super) fn whole_where(
    plan: &Plan,
    table: &ParameterTable,
    of: impl Fn(&ParameterEntry) -> bool,
) -> Vec<Stretch> {
    let chosen = |entry: &ParameterEntry| match of(entry) {
        true => Elements::All,
        false => Elements::None,
    };
    stretches(plan, table, |number| plan.own(number), chosen)
}

/// Which elements of a parameter are meant.
enum Elements {
    None,
    All,
    Some(Vec<bool>),
}

/// The parameters' stretches in a range of each bucket, as far as some of their elements are chosen.
fn stretches(
    plan: &Plan,
    table: &ParameterTable,
    range: impl Fn(usize) -> Range<usize>,
    choose: impl Fn(&ParameterEntry) -> Elements,
) -> Vec<Stretch> {
    let mut found = vec![];
    for bucket in 0..plan.buckets() {
        let range = range(bucket);
        let before = range.start - plan.own(bucket).start;
        for piece in plan.layout.bucket(bucket).pieces(range) {
            let chosen = match choose(&table.entries()[piece.index]) {
                Elements::None => Chosen::None,
                Elements::All => Chosen::All,
                Elements::Some(all) => mask(&all[piece.of_parameter], &plan.device),
            };
            if !matches!(chosen, Chosen::None) {
                let range = before + piece.of_range.start..before + piece.of_range.end;
                found.push(Stretch {
                    bucket,
                    index: piece.index,
                    range,
                    chosen,
                });
            }
        }
    }
    found
}

fn mask(elements: &[bool], device: &Device) -> Chosen {
    match (elements.contains(&true), elements.contains(&false)) {
        (false, _) => Chosen::None,
        (true, false) => Chosen::All,
        (true, true) => {
            let data = TensorData::new(elements.to_vec(), [elements.len()]);
            Chosen::Some(Tensor::from_data(data, device))
        }
    }
}

/// The elements of a parameter that lie in some of its sections.
fn chosen_sections(
    entry: &ParameterEntry,
    place: Place,
    choose: impl Fn(&Section) -> bool,
) -> Elements {
    let Placement::Split { dim, .. } = entry.placement else {
        return Elements::None;
    };
    let local = entry.local_shape(place);
    let sections = entry.placement.local_sections(place);
    let is_chosen = sections.iter().map(|(_, section)| choose(section));
    match is_chosen.clone().all(|chosen| chosen) {
        true => return Elements::All,
        false if is_chosen.clone().all(|chosen| !chosen) => return Elements::None,
        false => {}
    }
    let outer: usize = local[..dim].iter().product();
    let inner: usize = local[dim + 1..].iter().product();
    let mut row = vec![false; local[dim] * inner];
    for ((range, _), chosen) in sections.iter().zip(is_chosen) {
        row[range.start * inner..range.end * inner].fill(chosen);
    }
    Elements::Some(row.repeat(outer))
}
