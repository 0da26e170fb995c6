//! The placement of a parameter on the tensor axis. Pure values.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::mesh::AxisRank;

/// The placement of a parameter on the tensor axis.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// Every rank has the whole parameter.
    Replicated,
    /// Each rank has a part of each section of `dim`.
    Split {
        /// The split dimension.
        dim: usize,
        /// The sections along `dim`, in order; each is split on its own.
        sections: Vec<Section>,
    },
}

/// A range of a split dimension, such as the queries, the keys or the values of a fused QKV weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// Its size in the whole parameter.
    pub size: usize,
    /// The number of parts. With fewer parts than ranks, adjacent ranks hold replicas of the same part
    /// (the keys and values of grouped-query attention with few groups).
    pub parts: usize,
}

impl Section {
    /// The part of this section on the rank at `place`, relative to the section.
    pub fn range(&self, place: AxisRank) -> Range<usize> {
        let len = self.size / self.parts;
        let part = place.index * self.parts / place.size;
        part * len..(part + 1) * len
    }

    /// The number of ranks that hold the same part.
    pub fn replicas(&self, ranks: usize) -> usize {
        ranks / self.parts
    }

    /// Whether the rank at `place` is the first with its part.
    pub fn is_first_replica(&self, place: AxisRank) -> bool {
        place.index.is_multiple_of(self.replicas(place.size))
    }
}

impl Placement {
    /// One section along `dim`, split over all ranks.
    pub fn split(dim: usize, size: usize, ranks: usize) -> Self {
        Self::Split {
            dim,
            sections: vec![Section { size, parts: ranks }],
        }
    }

    /// The shape of the part on the rank at `place`, of a parameter of `shape`.
    ///
    /// The sections are longer than a padded parameter: see
    /// [`ParameterEntry::shape`](super::ParameterEntry::shape).
    pub fn local_shape(&self, shape: &[usize], place: AxisRank) -> Vec<usize> {
        let mut local = shape.to_vec();
        if let Self::Split { dim, .. } = self {
            local[*dim] = self.ranges(place).iter().map(Range::len).sum();
        }
        local
    }

    /// The ranges of the split dimension on the rank at `place`, in their local order. Empty for a
    /// replicated parameter.
    pub fn ranges(&self, place: AxisRank) -> Vec<Range<usize>> {
        let Self::Split { sections, .. } = self else {
            return vec![];
        };
        let mut start = 0;
        let mut ranges = Vec::with_capacity(sections.len());
        for section in sections {
            let range = section.range(place);
            ranges.push(start + range.start..start + range.end);
            start += section.size;
        }
        ranges
    }

    /// The ranges of the *local* split dimension, each with its section.
    pub fn local_sections(&self, place: AxisRank) -> Vec<(Range<usize>, Section)> {
        let Self::Split { sections, .. } = self else {
            return vec![];
        };
        let mut start = 0;
        let local = |section: &Section| {
            let len = section.range(place).len();
            start += len;
            (start - len..start, *section)
        };
        sections.iter().map(local).collect()
    }

    /// The elements of a whole parameter on the rank at `place`; padding is zero.
    pub fn part<T: Copy + Default>(&self, shape: &[usize], whole: &[T], place: AxisRank) -> Vec<T> {
        let Self::Split { dim, .. } = self else {
            return whole.to_vec();
        };
        let mut part = Vec::with_capacity(self.local_shape(shape, place).iter().product());
        for_each_contiguous_run(shape, *dim, &self.ranges(place), |run| {
            let at = run.at.unwrap_or(0);
            part.extend_from_slice(&whole[at..at + run.len]);
            part.resize(part.len() + run.padded_len - run.len, T::default());
        });
        part
    }

    /// Assembles a parameter from the parts of all ranks; padding beyond `shape` is dropped.
    ///
    /// `parts[i]` holds the elements of rank `i` in row-major order.
    pub fn assemble<T: Copy + Default>(&self, shape: &[usize], parts: &[Vec<T>]) -> Vec<T> {
        let Self::Split { dim, .. } = self else {
            return parts[0].clone();
        };
        let mut whole = vec![T::default(); shape.iter().product()];
        for (index, part) in parts.iter().enumerate() {
            let place = AxisRank {
                index,
                size: parts.len(),
            };
            let mut taken = 0;
            for_each_contiguous_run(shape, *dim, &self.ranges(place), |run| {
                if let Some(at) = run.at {
                    whole[at..at + run.len].copy_from_slice(&part[taken..taken + run.len]);
                }
                taken += run.padded_len;
            });
        }
        whole
    }
}

/// Elements that are contiguous both in the whole parameter and in a rank's part.
#[derive(Debug, PartialEq)]
pub(super) struct ContiguousRun {
    /// Its offset in the whole parameter; `None` if the run is padding only.
    pub at: Option<usize>,
    /// Its elements in the whole parameter.
    pub len: usize,
    /// Its elements in the part; more than `len` if it ends with padding.
    pub padded_len: usize,
}

/// Calls `visit` for each contiguous run of a rank's part, in row-major order.
///
/// `shape` is the whole parameter's; `ranges` are the rank's ranges of `dim`.
pub(super) fn for_each_contiguous_run(
    shape: &[usize],
    dim: usize,
    ranges: &[Range<usize>],
    mut visit: impl FnMut(ContiguousRun),
) {
    let outer: usize = shape[..dim].iter().product();
    let inner: usize = shape[dim + 1..].iter().product();
    for row in 0..outer {
        for range in ranges {
            let end = range.end.min(shape[dim]);
            let len = end.saturating_sub(range.start) * inner;
            let at = (len > 0).then_some((row * shape[dim] + range.start) * inner);
            visit(ContiguousRun {
                at,
                len,
                padded_len: range.len() * inner,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of 0, 1, 2, ... on each rank.
    fn parts(placement: &Placement, shape: &[usize], ranks: usize) -> Vec<Vec<i32>> {
        let whole: Vec<i32> = (0..shape.iter().product::<usize>() as i32).collect();
        let part = |index| placement.part(shape, &whole, AxisRank { index, size: ranks });
        (0..ranks).map(part).collect()
    }

    #[test]
    fn a_column_split_interleaves_rows() {
        let placement = Placement::split(1, 4, 2);
        assert_eq!(parts(&placement, &[2, 4], 2), [[0, 1, 4, 5], [2, 3, 6, 7]]);
        assert_eq!(
            placement.local_shape(&[2, 4], AxisRank { index: 1, size: 2 }),
            [2, 2]
        );
    }

    #[test]
    fn sections_are_split_one_by_one_and_can_be_replicated() {
        // Four query heads and two groups of keys and values over four ranks.
        let q = Section { size: 4, parts: 4 };
        let kv = Section { size: 2, parts: 2 };
        let placement = Placement::Split {
            dim: 0,
            sections: vec![q, kv, kv],
        };
        let local = parts(&placement, &[8], 4);
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
                let placement = Placement::Split {
                    dim,
                    sections: sections.clone(),
                };
                let whole = placement.assemble(&shape, &parts(&placement, &shape, ranks));
                assert!(whole.iter().enumerate().all(|(i, x)| *x == i as i32));
            }
        }
    }

    #[test]
    fn padding_is_dropped_when_assembled() {
        let placement = Placement::split(0, 8, 4);
        let local = parts(&placement, &[5, 2], 4);
        assert_eq!(
            local,
            [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0], [0, 0, 0, 0]]
        );
        assert_eq!(
            placement.assemble(&[5, 2], &local),
            (0..10).collect::<Vec<_>>()
        );
    }
}
