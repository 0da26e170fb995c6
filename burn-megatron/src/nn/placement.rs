//! The placement of a parameter on the axes of its grid.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::mesh::{Axis, AxisRank, AxisSet};

/// The placement of a parameter on one axis: replicated, or split along a dimension.
///
/// ```
/// use burn_megatron::nn::{AxisRank, Placement};
///
/// let placement = Placement::split(1, 6, 2);
/// let sections = placement.local_sections(AxisRank { index: 1, size: 2 });
/// assert_eq!(sections[0].whole, 3..6);
/// assert_eq!(sections[0].local, 0..3);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// Every rank of the axis has the full parameter.
    Replicated,
    /// The parameter is split along dimension `dim`. Each rank has a part of each section of this dimension.
    Split {
        /// The split dimension.
        dim: usize,
        /// The sections along `dim`, in order. Each section is split separately.
        sections: Vec<Section>,
    },
}

/// A section of a split dimension, such as the queries, the keys or the values of a fused QKV weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// The size of the section in the full parameter.
    pub size: usize,
    /// The number of parts into which the section is split. If there are fewer parts than ranks, adjacent ranks hold
    /// replicas of the same part. An example is grouped-query attention with fewer key-value heads than ranks.
    pub parts: usize,
}

impl Section {
    /// Returns the range of the part that the rank at `place` holds, relative to the beginning of the section.
    pub fn range(&self, place: AxisRank) -> Range<usize> {
        let len = self.size / self.parts;
        let part = place.index * self.parts / place.size;
        part * len..(part + 1) * len
    }

    /// Returns the number of ranks that hold each part, if the axis has `ranks` ranks.
    pub fn replicas(&self, ranks: usize) -> usize {
        ranks / self.parts
    }

    /// Returns whether the rank at `place` is the first rank that holds its part.
    pub fn is_first_replica(&self, place: AxisRank) -> bool {
        place.index.is_multiple_of(self.replicas(place.size))
    }
}

/// The part of a section on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalSection {
    /// The range of the part in the dimension of the full parameter. With padding the range may extend beyond the
    /// parameter.
    pub whole: Range<usize>,
    /// The range of the part in the dimension of the rank's local tensor.
    pub local: Range<usize>,
    /// The section that contains the part.
    pub section: Section,
}

impl Placement {
    /// Creates a placement that splits dimension `dim` of size `size` evenly over `ranks` ranks, as a single section.
    pub fn split(dim: usize, size: usize, ranks: usize) -> Self {
        Self::Split {
            dim,
            sections: vec![Section { size, parts: ranks }],
        }
    }

    /// Returns the parts of all sections on the rank at `place`, in order. The list is empty for a replicated
    /// parameter.
    pub fn local_sections(&self, place: AxisRank) -> Vec<LocalSection> {
        let Self::Split { sections, .. } = self else {
            return vec![];
        };
        let (mut start, mut local) = (0, 0);
        let part = |section: &Section| {
            let range = section.range(place);
            let whole = start + range.start..start + range.end;
            start += section.size;
            local += range.len();
            LocalSection {
                whole,
                local: local - range.len()..local,
                section: *section,
            }
        };
        sections.iter().map(part).collect()
    }
}

/// The placements of a parameter on the axes of its grid. The parameter is replicated on axes that are not listed.
///
/// Each dimension can be split by only one axis. Example:
/// `Placements::from((Axis::Tensor, Placement::split(1, 8, 2)))`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placements(BTreeMap<Axis, Placement>);

impl Placements {
    /// Sets the placement on `axis`.
    pub fn with(mut self, axis: Axis, placement: Placement) -> Self {
        match placement {
            Placement::Replicated => self.0.remove(&axis),
            split @ Placement::Split { .. } => self.0.insert(axis, split),
        };
        self
    }

    /// Returns the placement on `axis`.
    pub fn on(&self, axis: Axis) -> &Placement {
        self.0.get(&axis).unwrap_or(&Placement::Replicated)
    }

    /// Returns each axis over which the parameter is split, the dimension that is split over this axis, and the
    /// sections of this dimension.
    pub fn splits(&self) -> impl Iterator<Item = (Axis, usize, &[Section])> {
        self.0
            .iter()
            .filter_map(|(axis, placement)| match placement {
                Placement::Replicated => None,
                Placement::Split { dim, sections } => Some((*axis, *dim, &sections[..])),
            })
    }

    /// Returns the axes over which the parameter is split.
    pub fn split_axes(&self) -> AxisSet {
        self.splits().map(|(axis, ..)| axis).collect()
    }

    /// Returns the shape of a rank's part of a parameter that has the shape `shape`. `on(axis)` returns the position of
    /// the rank on an axis.
    ///
    /// With padding, the total size of the sections is larger than the size of the parameter in this dimension. See
    /// [`ParameterEntry::shape`](super::ParameterEntry::shape).
    pub fn local_shape(&self, shape: &[usize], on: impl Fn(Axis) -> AxisRank) -> Vec<usize> {
        let ranges = self.ranges(shape, on);
        let len = |ranges: &Vec<Range<usize>>| ranges.iter().map(Range::len).sum();
        ranges.iter().map(len).collect()
    }

    /// Selects the elements of a rank's part from the elements of a full parameter. `on(axis)` returns the position of
    /// the rank on an axis. Padding elements are zero.
    pub fn part<T: Copy + Default>(
        &self,
        shape: &[usize],
        whole: &[T],
        on: impl Fn(Axis) -> AxisRank,
    ) -> Vec<T> {
        let mut part = vec![];
        self.for_each_contiguous_run(shape, on, |run| {
            let at = run.at.unwrap_or(0);
            part.extend_from_slice(&whole[at..at + run.len]);
            part.resize(part.len() + run.padded_len - run.len, T::default());
        });
        part
    }

    /// Assembles a full parameter from the parts of ranks with different positions on the split axes. For each part,
    /// pass a function that returns the position of its rank on an axis. Padding beyond `shape` is dropped. For a
    /// replicated parameter the first part is used.
    pub fn assemble<'a, T: Copy + Default + 'a, F: Fn(Axis) -> AxisRank>(
        &self,
        shape: &[usize],
        parts: impl IntoIterator<Item = (F, &'a [T])>,
    ) -> Vec<T> {
        let mut parts = parts.into_iter();
        if self.0.is_empty() {
            return parts.next().map_or(vec![], |(_, whole)| whole.to_vec());
        }
        let mut whole = vec![T::default(); shape.iter().product()];
        for (on, part) in parts {
            let mut taken = 0;
            self.for_each_contiguous_run(shape, on, |run| {
                if let Some(at) = run.at {
                    whole[at..at + run.len].copy_from_slice(&part[taken..taken + run.len]);
                }
                taken += run.padded_len;
            });
        }
        whole
    }

    /// Calls `visit` for each contiguous run of a rank's part of a parameter of `shape`, in row-major order.
    pub(super) fn for_each_contiguous_run(
        &self,
        shape: &[usize],
        on: impl Fn(Axis) -> AxisRank,
        mut visit: impl FnMut(ContiguousRun),
    ) {
        let last = self.splits().map(|(_, dim, _)| dim).max();
        let walk = Walk {
            shape,
            ranges: &self.ranges(shape, on),
            last: last.unwrap_or(0),
        };
        match shape {
            // A scalar is a single run.
            [] => visit(ContiguousRun {
                at: Some(0),
                len: 1,
                padded_len: 1,
            }),
            _ => walk.dim(0, Some(0), &mut visit),
        }
    }

    /// Returns the ranges of each dimension on a rank, in local order.
    fn ranges(&self, shape: &[usize], on: impl Fn(Axis) -> AxisRank) -> Vec<Vec<Range<usize>>> {
        let whole = |size: &usize| std::iter::once(0..*size).collect();
        let mut ranges: Vec<Vec<_>> = shape.iter().map(whole).collect();
        for (axis, dim, _) in self.splits() {
            let sections = self.on(axis).local_sections(on(axis)).into_iter();
            ranges[dim] = sections.map(|section| section.whole).collect();
        }
        ranges
    }
}

impl From<(Axis, Placement)> for Placements {
    fn from((axis, placement): (Axis, Placement)) -> Self {
        Self::default().with(axis, placement)
    }
}

/// Elements that are contiguous both in the whole parameter and in a rank's part.
#[derive(Debug, PartialEq)]
pub(super) struct ContiguousRun {
    /// The offset of the run in the full parameter. `None` if the run is only padding.
    pub at: Option<usize>,
    /// The number of elements in the full parameter.
    pub len: usize,
    /// The number of elements in the part. It exceeds `len` if the run ends with padding.
    pub padded_len: usize,
}

/// A traversal of the elements of a rank's part.
struct Walk<'a> {
    shape: &'a [usize],
    /// The ranges of the rank in each dimension.
    ranges: &'a [Vec<Range<usize>>],
    /// The last split dimension. The dimensions after it are contiguous.
    last: usize,
}

impl Walk<'_> {
    /// Visits the dimensions from `dim` on. `row` is the flat index over the previous dimensions, or `None` in
    /// padding.
    fn dim(&self, dim: usize, row: Option<usize>, visit: &mut impl FnMut(ContiguousRun)) {
        let size = self.shape[dim];
        if dim < self.last {
            for index in self.ranges[dim].iter().cloned().flatten() {
                let row = row.filter(|_| index < size).map(|row| row * size + index);
                self.dim(dim + 1, row, visit);
            }
            return;
        }
        let inner: usize = self.shape[dim + 1..].iter().product();
        for range in &self.ranges[dim] {
            let len = range.end.min(size).saturating_sub(range.start) * inner;
            let at = row
                .filter(|_| len > 0)
                .map(|row| (row * size + range.start) * inner);
            visit(ContiguousRun {
                at,
                len: if at.is_some() { len } else { 0 },
                padded_len: range.len() * inner,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the part on each rank of a parameter with the elements 0, 1, 2, ...
    fn parts(placements: &Placements, shape: &[usize], ranks: usize) -> Vec<Vec<i32>> {
        let whole: Vec<i32> = (0..shape.iter().product::<usize>() as i32).collect();
        let part = |index| placements.part(shape, &whole, |_| AxisRank { index, size: ranks });
        (0..ranks).map(part).collect()
    }

    fn assembled(placements: &Placements, shape: &[usize], parts: &[Vec<i32>]) -> Vec<i32> {
        let size = parts.len();
        let parts = parts.iter().enumerate().map(|(index, part)| {
            let on = move |_| AxisRank { index, size };
            (on, &part[..])
        });
        placements.assemble(shape, parts)
    }

    fn on_tensor(placement: Placement) -> Placements {
        Placements::from((Axis::Tensor, placement))
    }

    #[test]
    fn a_column_split_interleaves_rows() {
        let placements = on_tensor(Placement::split(1, 4, 2));
        assert_eq!(parts(&placements, &[2, 4], 2), [[0, 1, 4, 5], [2, 3, 6, 7]]);
        assert_eq!(
            placements.local_shape(&[2, 4], |_| AxisRank { index: 1, size: 2 }),
            [2, 2]
        );
    }

    #[test]
    fn sections_are_split_one_by_one_and_can_be_replicated() {
        // Four query heads and two key-value heads over four ranks.
        let q = Section { size: 4, parts: 4 };
        let kv = Section { size: 2, parts: 2 };
        let placements = on_tensor(Placement::Split {
            dim: 0,
            sections: vec![q, kv, kv],
        });
        let local = parts(&placements, &[8], 4);
        assert_eq!(local, [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]);
        assert_eq!(kv.replicas(4), 2);
        let first = |index| kv.is_first_replica(AxisRank { index, size: 4 });
        assert_eq!(
            [first(0), first(1), first(2), first(3)],
            [true, false, true, false]
        );
    }

    #[test]
    fn assembling_undoes_every_split() {
        for ranks in [1, 2, 4] {
            let sections = [(8, ranks), (4, ranks.min(2)), (4, ranks.min(2))];
            let sections = sections
                .map(|(size, parts)| Section { size, parts })
                .to_vec();
            for dim in 0..3 {
                let mut shape = [3, 2, 5];
                shape[dim] = 16;
                let placements = on_tensor(Placement::Split {
                    dim,
                    sections: sections.clone(),
                });
                let parts = parts(&placements, &shape, ranks);
                let whole = assembled(&placements, &shape, &parts);
                assert!(whole.iter().enumerate().all(|(i, x)| *x == i as i32));
            }
        }
    }

    #[test]
    fn padding_is_dropped_when_assembled() {
        let placements = on_tensor(Placement::split(0, 8, 4));
        let local = parts(&placements, &[5, 2], 4);
        assert_eq!(
            local,
            [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0], [0, 0, 0, 0]]
        );
        assert_eq!(
            assembled(&placements, &[5, 2], &local),
            (0..10).collect::<Vec<_>>()
        );
    }
}
