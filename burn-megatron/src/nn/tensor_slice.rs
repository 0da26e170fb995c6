//! Rectangular slices of tensors.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A rectangular slice of a tensor. In each dimension `d` the slice has `shape[d]` elements and starts at index
/// `offset[d]`.
///
/// ```
/// use burn_megatron::nn::TensorSlice;
///
/// let slices = TensorSlice::from_flat_range(&[4, 3], 2..9);
/// let slices: Vec<_> = slices.iter().map(TensorSlice::to_string).collect();
/// assert_eq!(slices, ["[0..1, 2..3]", "[1..3, 0..3]"]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSlice {
    /// The first index in each dimension.
    pub offset: Vec<usize>,
    /// The number of elements in each dimension.
    pub shape: Vec<usize>,
}

/// A run of elements that are contiguous both in a slice and in the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContiguousRun {
    /// The flat, row-major index of the first element in the tensor.
    pub in_tensor: usize,
    /// The flat, row-major index of the first element in the slice.
    pub in_slice: usize,
    /// The number of elements.
    pub len: usize,
}

impl TensorSlice {
    /// Returns the slice that covers a complete tensor of this shape.
    pub fn whole(shape: &[usize]) -> Self {
        Self {
            offset: vec![0; shape.len()],
            shape: shape.to_vec(),
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether the slice has no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Returns the index range of the slice in dimension `dim`.
    pub fn range(&self, dim: usize) -> Range<usize> {
        self.offset[dim]..self.offset[dim] + self.shape[dim]
    }

    /// Returns whether the slice is inside a tensor of this shape.
    pub fn fits(&self, shape: &[usize]) -> bool {
        let dims = [self.offset.len(), self.shape.len()];
        let ends_in = |dim: usize| {
            let end = self.offset[dim].checked_add(self.shape[dim]);
            end.is_some_and(|end| end <= shape[dim])
        };
        dims == [shape.len(); 2] && (0..shape.len()).all(ends_in)
    }

    /// Returns the intersection of two slices of the same tensor, or `None` if it is empty.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let dims = 0..self.shape.len();
        let both: Vec<_> = dims
            .map(|dim| {
                let (a, b) = (self.range(dim), other.range(dim));
                a.start.max(b.start)..a.end.min(b.end)
            })
            .collect();
        (!both.iter().any(Range::is_empty)).then(|| Self {
            offset: both.iter().map(|range| range.start).collect(),
            shape: both.iter().map(Range::len).collect(),
        })
    }

    /// Returns the same slice with offsets relative to `outer`, which must contain the slice.
    pub fn within(&self, outer: &Self) -> Self {
        let offset = self.offset.iter().zip(&outer.offset);
        Self {
            offset: offset.map(|(own, outer)| own - outer).collect(),
            shape: self.shape.clone(),
        }
    }

    /// Splits the slice into runs that are contiguous in a tensor of this `shape`, in row-major order. The list is
    /// empty if the slice is empty.
    pub fn runs(&self, shape: &[usize]) -> Vec<ContiguousRun> {
        if self.is_empty() {
            return vec![];
        }
        // The inner dims that the slice covers completely, and the next outer dim, form one run.
        let inner = (1..shape.len())
            .rev()
            .take_while(|dim| self.shape[*dim] == shape[*dim]);
        let first = shape.len().saturating_sub(1 + inner.count());
        let len = self.shape[first..].iter().product::<usize>();
        let count = self.shape[..first].iter().product::<usize>();
        let run = |number: usize| {
            let (mut left, mut at, mut stride) = (number, 0, 1);
            for dim in (0..shape.len()).rev() {
                let place = if dim < first {
                    let place = left % self.shape[dim];
                    left /= self.shape[dim];
                    place
                } else {
                    0
                };
                at += (self.offset[dim] + place) * stride;
                stride *= shape[dim];
            }
            ContiguousRun {
                in_tensor: at,
                in_slice: number * len,
                len,
            }
        };
        (0..count).map(run).collect()
    }

    /// Splits a range of row-major element indices of a tensor of this `shape` into slices, in row-major order. For a
    /// tensor with `d` dimensions there are at most `2 d - 1` slices.
    pub fn from_flat_range(shape: &[usize], range: Range<usize>) -> Vec<Self> {
        let mut slices = vec![];
        cut(shape, range, &mut vec![], &mut slices);
        slices
    }
}

/// Writes the index ranges of all dimensions, such as `[0..4, 8..16]`.
impl fmt::Display for TensorSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims = self.offset.iter().zip(&self.shape);
        // The sum must not overflow, so that errors can show an invalid slice.
        let dims = dims.map(|(start, len)| format!("{start}..{}", *start as u128 + *len as u128));
        write!(f, "[{}]", dims.collect::<Vec<_>>().join(", "))
    }
}

/// Cuts a flat range over the remaining dims `shape`, at the indices `above` of the outer dims.
fn cut(
    shape: &[usize],
    range: Range<usize>,
    above: &mut Vec<usize>,
    slices: &mut Vec<TensorSlice>,
) {
    if range.is_empty() {
        return;
    }
    let ones = |above: &[usize]| vec![1; above.len()];
    let Some((_, inner)) = shape.split_first() else {
        slices.push(TensorSlice {
            offset: above.clone(),
            shape: ones(above),
        });
        return;
    };
    let row: usize = inner.iter().product();
    // Cuts a part of the row at `at`.
    let part = |at: usize, range: Range<usize>, above: &mut Vec<usize>, slices: &mut Vec<_>| {
        above.push(at);
        let range = range.start - at * row..range.end - at * row;
        cut(inner, range, above, slices);
        above.pop();
    };
    let (first, end) = (range.start.div_ceil(row), range.end / row);
    if first > end {
        // The range is within one row.
        return part(range.start / row, range, above, slices);
    }
    if range.start < first * row {
        part(range.start / row, range.start..first * row, above, slices);
    }
    if first < end {
        slices.push(TensorSlice {
            offset: [&above[..], &[first], &vec![0; inner.len()]].concat(),
            shape: [&ones(above)[..], &[end - first], inner].concat(),
        });
    }
    if range.end > end * row {
        part(end, end * row..range.end, above, slices);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slice(offset: &[usize], shape: &[usize]) -> TensorSlice {
        TensorSlice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        }
    }

    /// Returns the flat indices of a slice.
    fn places(of: &TensorSlice, shape: &[usize]) -> Vec<usize> {
        let runs = of.runs(shape);
        let places = runs
            .iter()
            .flat_map(|run| run.in_tensor..run.in_tensor + run.len);
        places.collect()
    }

    #[test]
    fn runs_are_as_long_as_they_can_be() {
        let run = |in_tensor, in_slice, len| ContiguousRun {
            in_tensor,
            in_slice,
            len,
        };
        assert_eq!(
            TensorSlice::whole(&[2, 3, 4]).runs(&[2, 3, 4]),
            [run(0, 0, 24)]
        );
        assert_eq!(TensorSlice::whole(&[]).runs(&[]), [run(0, 0, 1)]);
        let middle = slice(&[0, 1, 0], &[2, 2, 4]);
        assert_eq!(middle.runs(&[2, 3, 4]), [run(4, 0, 8), run(16, 8, 8)]);
        assert_eq!(
            slice(&[1, 2], &[2, 2]).runs(&[4, 5]),
            [run(7, 0, 2), run(12, 2, 2)]
        );
        assert_eq!(slice(&[1, 2], &[0, 2]).runs(&[4, 5]), []);
    }

    #[test]
    fn what_does_not_fit_is_known() {
        assert!(slice(&[1, 2], &[3, 3]).fits(&[4, 5]));
        assert!(!slice(&[1, 2], &[3, 4]).fits(&[4, 5]));
        assert!(!slice(&[1], &[3]).fits(&[4, 5]));
        assert!(!slice(&[usize::MAX], &[3]).fits(&[4]));
    }

    #[test]
    fn two_boxes_share_a_box() {
        let (a, b) = (slice(&[0, 2], &[3, 3]), slice(&[1, 0], &[3, 3]));
        let both = a.intersection(&b).unwrap();
        assert_eq!(both, slice(&[1, 2], &[2, 1]));
        assert_eq!(both.within(&b), slice(&[0, 2], &[2, 1]));
        assert_eq!(a.intersection(&slice(&[3, 0], &[1, 9])), None);
    }

    proptest! {
        #[test]
        fn boxes_of_a_stretch_are_the_stretch(
            shape in prop::collection::vec(1usize..5, 0..4),
            ends in (0.0..1.0, 0.0..1.0),
        ) {
            let len: usize = shape.iter().product();
            let at = |x: f64| (x * (len + 1) as f64) as usize;
            let (a, b) = (at(ends.0).min(len), at(ends.1).min(len));
            let range = a.min(b)..a.max(b);
            let slices = TensorSlice::from_flat_range(&shape, range.clone());
            prop_assert!(slices.len() < (2 * shape.len()).max(2));
            prop_assert!(slices.iter().all(|part| part.fits(&shape) && !part.is_empty()));
            let found: Vec<_> = slices.iter().flat_map(|part| places(part, &shape)).collect();
            prop_assert_eq!(found, range.collect::<Vec<_>>());
        }
    }
}
