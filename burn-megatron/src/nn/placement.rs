//! How the ranks of the tensor axis share one parameter. Pure values.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::mesh::Place;

/// Where the elements of a parameter lie on the tensor axis.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// Every rank has the whole parameter.
    Replicated,
    /// Each rank has a part of each section of `dim`.
    Split {
        /// The dimension that is cut.
        dim: usize,
        /// What lies along `dim`, in order; each section is cut on its own.
        sections: Vec<Section>,
    },
}

/// A stretch of a split dimension, such as the queries, the keys or the values of an attention
/// layer's joint weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// Its size in the whole parameter.
    pub size: usize,
    /// Into how many parts it is cut. With fewer parts than ranks, neighbouring ranks hold the
    /// same part (the keys and values of grouped-query attention with few groups).
    pub parts: usize,
}

impl Section {
    /// The stretch of this section that the rank at `place` holds, counted from its beginning.
    pub fn range(&self, place: Place) -> Range<usize> {
        let len = self.size / self.parts;
        let part = place.index * self.parts / place.size;
        part * len..(part + 1) * len
    }

    /// How many ranks hold the same part.
    pub fn replicas(&self, ranks: usize) -> usize {
        ranks / self.parts
    }

    /// Whether the rank at `place` is the first that holds its part.
    pub fn is_first_replica(&self, place: Place) -> bool {
        place.index.is_multiple_of(self.replicas(place.size))
    }
}

impl Placement {
    /// `dim` cut once into as many parts as there are ranks.
    pub fn split(dim: usize, size: usize, ranks: usize) -> Self {
        Self::Split {
            dim,
            sections: vec![Section { size, parts: ranks }],
        }
    }

    /// The shape of the part that the rank at `place` holds of a parameter of `shape`.
    ///
    /// The sections can be longer than the parameter where it is padded: see
    /// [`ParameterEntry::shape`](super::ParameterEntry::shape).
    pub fn local_shape(&self, shape: &[usize], place: Place) -> Vec<usize> {
        let mut local = shape.to_vec();
        if let Self::Split { dim, .. } = self {
            local[*dim] = self.ranges(place).iter().map(Range::len).sum();
        }
        local
    }

    /// The stretches of the split dimension that the rank at `place` holds, in the order in which
    /// they lie there. Empty for a replicated parameter.
    pub fn ranges(&self, place: Place) -> Vec<Range<usize>> {
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

    /// The stretches of the *local* split dimension, each with its section.
    pub fn local_sections(&self, place: Place) -> Vec<(Range<usize>, Section)> {
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

    /// The elements that the rank at `place` holds of a whole parameter; padding is zero.
    pub fn part<T: Copy + Default>(&self, shape: &[usize], whole: &[T], place: Place) -> Vec<T> {
        let Self::Split { dim, .. } = self else {
            return whole.to_vec();
        };
        let mut part = Vec::with_capacity(self.local_shape(shape, place).iter().product());
        for_each_run(shape, *dim, &self.ranges(place), |run| {
            let at = run.at.unwrap_or(0);
            part.extend_from_slice(&whole[at..at + run.len]);
            part.resize(part.len() + run.padded_len - run.len, T::default());
        });
        part
    }

    /// Puts the parts of all ranks together; padding beyond `shape` is dropped.
    ///
    /// `parts[i]` holds the elements of rank `i` in row-major order.
    pub fn assemble<T: Copy + Default>(&self, shape: &[usize], parts: &[Vec<T>]) -> Vec<T> {
        let Self::Split { dim, .. } = self else {
            return parts[0].clone();
        };
        let mut whole = vec![T::default(); shape.iter().product()];
        for (index, part) in parts.iter().enumerate() {
            let place = Place {
                index,
                size: parts.len(),
            };
            let mut taken = 0;
            for_each_run(shape, *dim, &self.ranges(place), |run| {
                if let Some(at) = run.at {
                    whole[at..at + run.len].copy_from_slice(&part[taken..taken + run.len]);
                }
                taken += run.padded_len;
            });
        }
        whole
    }
}

/// Elements that follow each other both in the whole parameter and in a rank's part.
#[derive(Debug, PartialEq)]
pub(super) struct Run {
    /// Where it begins in the whole parameter; `None` where the part holds padding only.
    pub at: Option<usize>,
    /// Its elements in the whole parameter.
    pub len: usize,
    /// Its elements in the part: more than `len` where the end is padding.
    pub padded_len: usize,
}

/// Walks the elements of a rank's part in row-major order, run by run.
///
/// `shape` is the whole parameter's; `ranges` are the stretches of `dim` that the rank holds.
pub(super) fn for_each_run(
    shape: &[usize],
    dim: usize,
    ranges: &[Range<usize>],
    mut visit: impl FnMut(Run),
) {
    let outer: usize = shape[..dim].iter().product();
    let inner: usize = shape[dim + 1..].iter().product();
    for row in 0..outer {
        for range in ranges {
            let end = range.end.min(shape[dim]);
            let len = end.saturating_sub(range.start) * inner;
            let at = (len > 0).then_some((row * shape[dim] + range.start) * inner);
            visit(Run {
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

    /// The parts that each rank would hold of 0, 1, 2, ...
    fn parts(placement: &Placement, shape: &[usize], ranks: usize) -> Vec<Vec<i32>> {
        let whole: Vec<i32> = (0..shape.iter().product::<usize>() as i32).collect();
        let part = |index| placement.part(shape, &whole, Place { index, size: ranks });
        (0..ranks).map(part).collect()
    }

    #[test]
    fn a_column_split_interleaves_rows() {
        let placement = Placement::split(1, 4, 2);
        assert_eq!(parts(&placement, &[2, 4], 2), [[0, 1, 4, 5], [2, 3, 6, 7]]);
        assert_eq!(
            placement.local_shape(&[2, 4], Place { index: 1, size: 2 }),
            [2, 2]
        );
    }

    #[test]
    fn sections_are_cut_one_by_one_and_can_be_shared() {
        // Four query heads and two groups of keys and values over four ranks.
        let q = Section { size: 4, parts: 4 };
        let kv = Section { size: 2, parts: 2 };
        let placement = Placement::Split {
            dim: 0,
            sections: vec![q, kv, kv],
        };
        let held = parts(&placement, &[8], 4);
        assert_eq!(held, [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]);
        assert_eq!(kv.replicas(4), 2);
        let first = |index| kv.is_first_replica(Place { index, size: 4 });
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
        let held = parts(&placement, &[5, 2], 4);
        assert_eq!(
            held,
            [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0], [0, 0, 0, 0]]
        );
        assert_eq!(
            placement.assemble(&[5, 2], &held),
            (0..10).collect::<Vec<_>>()
        );
    }
}
