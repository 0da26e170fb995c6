//! The gradients of one step, reduced and ready for the optimizer.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::Tensor;

use super::sums::Sums;
use crate::collective::Comm;
use crate::comm::{CommError, Groups};
use crate::nn::{ParameterEntry, ParameterTable, Place, Placement};

/// One flat gradient per parameter of the table: this rank's part.
///
/// It is kept as a sum over all tokens and one factor for all parameters, so that dividing and
/// clipping cost nothing before the optimizer reads the sums.
#[derive(Clone, Debug)]
pub struct Gradients {
    sums: Vec<Tensor<1>>,
    factor: f64,
    /// The tokens of all micro-batches on all ranks, by which the gradients are divided.
    pub tokens: u64,
}

/// The groups in which shared sections are summed: by number of ranks that hold the same part.
#[derive(Debug)]
pub(super) struct SharedGroups(BTreeMap<usize, Comm>);

impl SharedGroups {
    /// Forms the groups that `table` calls for; every rank of the tensor axis must come.
    pub fn new(table: &ParameterTable, groups: &Groups) -> Result<Self, CommError> {
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
        let form = |size| Ok((size, groups.tensor_neighbours(size)?));
        sizes
            .into_iter()
            .map(form)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl Gradients {
    /// Sums over the model's ranks what is a part of a sum, and divides by the tokens. The sum over
    /// the data axis is done.
    pub(super) fn reduced(
        mut flat: Vec<Tensor<1>>,
        tokens: u64,
        table: &ParameterTable,
        groups: &Groups,
        shared: &SharedGroups,
    ) -> Self {
        let partial = |index: usize| table.entries()[index].partial_gradient;
        sum_together(&mut flat, partial, groups.tensor());
        let at_both_ends = |index: usize| table.entries()[index].at_both_ends;
        sum_together(&mut flat, at_both_ends, groups.ends());
        for (replicas, comm) in &shared.0 {
            sum_shared(&mut flat, table, groups.place(), *replicas, comm);
        }
        Self::new(flat, tokens)
    }

    /// Gradients from their sums over `tokens`, `[elements]` of each parameter in the order of the
    /// table.
    pub fn new(sums: Vec<Tensor<1>>, tokens: u64) -> Self {
        Self {
            sums,
            factor: 1.0 / tokens.max(1) as f64,
            tokens,
        }
    }

    /// The gradients, `[elements]` of each parameter in the order of the table.
    pub fn flat(&self) -> impl Iterator<Item = Tensor<1>> + '_ {
        let scaled = |sum: &Tensor<1>| sum.clone().mul_scalar(self.factor);
        self.sums.iter().map(scaled)
    }

    /// What is to be multiplied with [`factor`](Self::factor).
    pub fn sums(&self) -> &[Tensor<1>] {
        &self.sums
    }

    /// What the sums are to be multiplied with.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// The sums, for the optimizer, which may write over them.
    pub fn into_sums(self) -> Vec<Tensor<1>> {
        self.sums
    }

    /// Multiplies every gradient.
    pub fn scale(&mut self, factor: f64) {
        self.factor *= factor;
    }
}

/// Sums the chosen tensors over the ranks of `comm`.
pub(super) fn sum_together(tensors: &mut [Tensor<1>], chosen: impl Fn(usize) -> bool, comm: &Comm) {
    if comm.size() == 1 {
        return;
    }
    let all = tensors.iter().cloned().enumerate();
    let chosen = all.filter(|(index, _)| chosen(*index)).collect();
    Sums::start(chosen, comm).finish(|index, sum| tensors[index] = sum);
}

/// Sums the sections that `replicas` neighbours hold together.
fn sum_shared(
    flat: &mut [Tensor<1>],
    table: &ParameterTable,
    place: Place,
    replicas: usize,
    comm: &Comm,
) {
    let mut stretches = vec![];
    for (index, entry) in table.entries().iter().enumerate() {
        for (range, section) in entry.placement.local_sections(place) {
            if section.replicas(place.size) == replicas {
                stretches.push((index, range));
            }
        }
    }
    let view = |flat: &[Tensor<1>], index: usize| {
        flat[index]
            .clone()
            .reshape(split_shape(&table.entries()[index], place))
    };
    let mut parts: Vec<Tensor<1>> = stretches
        .iter()
        .map(|(index, range)| {
            let part = view(flat, *index).narrow(1, range.start, range.len());
            let len = part.shape().num_elements();
            part.reshape([len])
        })
        .collect();
    sum_together(&mut parts, |_| true, comm);
    for ((index, range), part) in stretches.into_iter().zip(parts) {
        let whole = view(flat, index);
        let [outer, _, inner] = whole.dims();
        let part = part.reshape([outer, range.len(), inner]);
        let whole = whole.slice_assign([0..outer, range, 0..inner], part);
        let len = whole.shape().num_elements();
        flat[index] = whole.reshape([len]);
    }
}

/// A split parameter's local shape with the split dimension in the middle.
fn split_shape(entry: &ParameterEntry, place: Place) -> [usize; 3] {
    let local = entry.local_shape(place);
    let dim = match entry.placement {
        Placement::Split { dim, .. } => dim,
        Placement::Replicated => 0,
    };
    [
        local[..dim].iter().product(),
        local[dim],
        local[dim + 1..].iter().product(),
    ]
}

/// The stretches of a parameter's split dimension that this rank counts, so that over the tensor
/// axis each element of the whole parameter is counted once; `[outer, split, inner]` around them.
pub(crate) fn owned(entry: &ParameterEntry, place: Place) -> ([usize; 3], Vec<Range<usize>>) {
    let shape = split_shape(entry, place);
    let whole = std::iter::once(0..shape[1]);
    let ranges = match &entry.placement {
        Placement::Replicated => whole.filter(|_| place.index == 0).collect(),
        placement => placement
            .local_sections(place)
            .into_iter()
            .filter(|(_, section)| section.is_first_replica(place))
            .map(|(range, _)| range)
            .collect(),
    };
    (shape, ranges)
}
