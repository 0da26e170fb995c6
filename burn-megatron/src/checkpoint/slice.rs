//! Boxes of tensors. Pure values.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A box of a tensor: `shape[d]` elements from `offset[d]` on, in every dim `d`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// Where it begins, by dim.
    pub offset: Vec<usize>,
    /// How many elements it has, by dim.
    pub shape: Vec<usize>,
}

/// Elements that follow each other both in a box and in the tensor that it is cut from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they begin in the tensor, in row-major order.
    pub in_tensor: usize,
    /// Where they begin in the box.
    pub in_slice: usize,
    /// How many there are.
    pub len: usize,
}

impl Slice {
    /// All of a tensor.
    pub fn whole(shape: &[usize]) -> Self {
        Self {
            offset: vec![0; shape.len()],
            shape: shape.to_vec(),
        }
    }

    /// The number of its elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// What it takes of a dim.
    pub fn range(&self, dim: usize) -> Range<usize> {
        self.offset[dim]..self.offset[dim] + self.shape[dim]
    }

    /// Whether it lies in a tensor of this shape.
    pub fn fits(&self, shape: &[usize]) -> bool {
        let dims = [self.offset.len(), self.shape.len()];
        let ends_in = |dim: usize| {
            let end = self.offset[dim].checked_add(self.shape[dim]);
            end.is_some_and(|end| end <= shape[dim])
        };
        dims == [shape.len(); 2] && (0..shape.len()).all(ends_in)
    }

    /// What both have, if anything.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let dims = 0..self.shape.len();
        let both = dims.map(|dim| {
            let (a, b) = (self.range(dim), other.range(dim));
            a.start.max(b.start)..a.end.min(b.end)
        });
        let both: Vec<_> = both.collect();
        (!both.iter().any(Range::is_empty)).then(|| Self {
            offset: both.iter().map(|range| range.start).collect(),
            shape: both.iter().map(Range::len).collect(),
        })
    }

    /// The same box, with its place counted from the beginning of `outer`, in which it lies.
    pub fn within(&self, outer: &Self) -> Self {
        let offset = self.offset.iter().zip(&outer.offset);
        Self {
            offset: offset.map(|(own, outer)| own - outer).collect(),
            shape: self.shape.clone(),
        }
    }

    /// The runs that make up the box, of a tensor of this `shape`, in row-major order. An empty box has
    /// none.
    pub fn runs(&self, shape: &[usize]) -> Vec<Run> {
        if self.is_empty() {
            return vec![];
        }
        // Dims from `first` on lie in the tensor as they lie in the box, but for the outermost of them.
        let inner = (1..shape.len())
            .rev()
            .take_while(|dim| self.shape[*dim] == shape[*dim]);
        let first = shape.len().saturating_sub(1 + inner.count());
        let len = self.shape[first..].iter().product::<usize>();
        let count = self.shape[..first].iter().product::<usize>();
        let run = |number: usize| {
            let (mut left, mut at, mut stride) = (number, 0, 1);
            for dim in (0..shape.len()).rev() {
                let place = match dim < first {
                    true => {
                        let place = left % self.shape[dim];
                        left /= self.shape[dim];
                        place
                    }
                    false => 0,
                };
                at += (self.offset[dim] + place) * stride;
                stride *= shape[dim];
            }
            Run {
                in_tensor: at,
                in_slice: number * len,
                len,
            }
        };
        (0..count).map(run).collect()
    }

    /// A stretch of a flattened tensor of this `shape`, as boxes in row-major order: at most
    /// `2 dims - 1` of them.
    pub fn of_stretch(shape: &[usize], stretch: Range<usize>) -> Vec<Self> {
        let mut boxes = vec![];
        cut(shape, stretch, &mut vec![], &mut boxes);
        boxes
    }
}

/// As ranges: `[0..4, 8..16]`.
impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims = self.offset.iter().zip(&self.shape);
        // One that fits nowhere can be shown too.
        let dims = dims.map(|(start, len)| format!("{start}..{}", *start as u128 + *len as u128));
        write!(f, "[{}]", dims.collect::<Vec<_>>().join(", "))
    }
}

/// Cuts a stretch of the dims that are left in `shape`, below the places `above` in the outer ones.
fn cut(shape: &[usize], stretch: Range<usize>, above: &mut Vec<usize>, boxes: &mut Vec<Slice>) {
    if stretch.is_empty() {
        return;
    }
    let ones = |above: &[usize]| vec![1; above.len()];
    let Some((_, inner)) = shape.split_first() else {
        boxes.push(Slice {
            offset: above.clone(),
            shape: ones(above),
        });
        return;
    };
    let row: usize = inner.iter().product();
    let mut part = |stretch: Range<usize>, boxes: &mut Vec<Slice>| {
        let at = stretch.start / row;
        above.push(at);
        cut(
            inner,
            stretch.start - at * row..stretch.end - at * row,
            above,
            boxes,
        );
        above.pop();
    };
    let (first, end) = (stretch.start.div_ceil(row), stretch.end / row);
    if first > end {
        // It begins and ends in one row.
        return part(stretch, boxes);
    }
    part(stretch.start..first * row, boxes);
    if first < end {
        let whole = |above: &[usize]| Slice {
            offset: [above, &[first], &vec![0; inner.len()]].concat(),
            shape: [&ones(above)[..], &[end - first], inner].concat(),
        };
        boxes.push(whole(above));
    }
    let mut part = |stretch: Range<usize>, boxes: &mut Vec<Slice>| {
        above.push(end);
        cut(
            inner,
            stretch.start - end * row..stretch.end - end * row,
            above,
            boxes,
        );
        above.pop();
    };
    if stretch.end > end * row {
        part(end * row..stretch.end, boxes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slice(offset: &[usize], shape: &[usize]) -> Slice {
        Slice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        }
    }

    /// The flat places of a box.
    fn places(of: &Slice, shape: &[usize]) -> Vec<usize> {
        let runs = of.runs(shape);
        let places = runs
            .iter()
            .flat_map(|run| run.in_tensor..run.in_tensor + run.len);
        places.collect()
    }

    #[test]
    fn runs_are_as_long_as_they_can_be() {
        let run = |in_tensor, in_slice, len| Run {
            in_tensor,
            in_slice,
            len,
        };
        assert_eq!(Slice::whole(&[2, 3, 4]).runs(&[2, 3, 4]), [run(0, 0, 24)]);
        assert_eq!(Slice::whole(&[]).runs(&[]), [run(0, 0, 1)]);
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
            let stretch = a.min(b)..a.max(b);
            let boxes = Slice::of_stretch(&shape, stretch.clone());
            prop_assert!(boxes.len() < (2 * shape.len()).max(2));
            prop_assert!(boxes.iter().all(|part| part.fits(&shape) && !part.is_empty()));
            let found: Vec<_> = boxes.iter().flat_map(|part| places(part, &shape)).collect();
            prop_assert_eq!(found, stretch.collect::<Vec<_>>());
        }
    }
}
