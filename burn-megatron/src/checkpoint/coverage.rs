//! Checks that slices cover a tensor without overlap.

use std::collections::BTreeSet;

use super::{CheckpointError, TensorSlice};

/// Checks that each element of a tensor is in exactly one of the slices. The slices must not be empty and must be
/// within the shape. The number of elements of the shape must fit into a `usize`.
///
/// # Errors
///
/// [`CheckpointError::Overlap`] with the first element that is in two slices. [`CheckpointError::Gap`] with the first
/// element that is in no slice.
pub fn check(key: &str, shape: &[usize], slices: &[&TensorSlice]) -> Result<(), CheckpointError> {
    if let Some((first, second, both)) = overlap(shape, slices) {
        return Err(CheckpointError::Overlap {
            key: key.into(),
            first: first.clone(),
            second: second.clone(),
            element: both.offset,
        });
    }
    match gap(shape, slices) {
        None => Ok(()),
        Some(element) => Err(CheckpointError::Gap {
            key: key.into(),
            element,
        }),
    }
}

/// Returns two slices that overlap and their intersection, if there are any.
fn overlap<'a>(
    shape: &[usize],
    slices: &[&'a TensorSlice],
) -> Option<(&'a TensorSlice, &'a TensorSlice, TensorSlice)> {
    // Each slice is only compared with slices whose range overlaps in one dim: the dim with the most distinct
    // offsets.
    let places = |dim: usize| {
        let starts = slices.iter().map(|part| part.offset[dim]);
        starts.collect::<BTreeSet<_>>().len()
    };
    let Some(dim) = (0..shape.len()).max_by_key(|dim| places(*dim)) else {
        let both = slices.first().zip(slices.get(1));
        return both.map(|(first, second)| (*first, *second, TensorSlice::whole(&[])));
    };
    let mut sorted = slices.to_vec();
    sorted.sort_by_key(|part| part.offset[dim]);
    let mut open: Vec<&TensorSlice> = vec![];
    for part in sorted {
        open.retain(|other| other.range(dim).end > part.offset[dim]);
        let found = open
            .iter()
            .find(|other| (0..shape.len()).all(|dim| meet(other, part, dim)));
        if let Some(both) = found.and_then(|other| other.intersection(part)) {
            let other = found.copied()?;
            return Some((other, part, both));
        }
        open.push(part);
    }
    None
}

fn meet(a: &TensorSlice, b: &TensorSlice, dim: usize) -> bool {
    a.offset[dim] < b.range(dim).end && b.offset[dim] < a.range(dim).end
}

/// Returns the first element that is in none of these disjoint slices.
fn gap(shape: &[usize], slices: &[&TensorSlice]) -> Option<Vec<usize>> {
    let mut slices = slices.to_vec();
    let mut element = vec![];
    let volume = |part: &&TensorSlice, from: usize| part.shape[from..].iter().product::<usize>();
    let full = |slices: &[&TensorSlice], from: usize| {
        let volumes = slices.iter().map(|part| volume(part, from) as u128);
        volumes.sum::<u128>() == shape[from..].iter().product::<usize>() as u128
    };
    if full(&slices, 0) {
        return None;
    }
    for (dim, len) in shape.iter().enumerate() {
        // The covering slices only change at these indices.
        let mut places: BTreeSet<usize> = slices.iter().map(|part| part.range(dim).end).collect();
        places.insert(0);
        places.extend(slices.iter().map(|part| part.offset[dim]));
        let at = |place: usize| {
            let slices = slices.iter().copied();
            let there = slices.filter(|part| part.range(dim).contains(&place));
            there.collect::<Vec<_>>()
        };
        let found = places
            .into_iter()
            .filter(|place| place < len)
            .map(|place| (place, at(place)))
            .find(|(_, there)| !full(there, dim + 1));
        // If the complete tensor is not covered, some index is not covered.
        let (place, there) = found?;
        element.push(place);
        slices = there;
    }
    Some(element)
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

    fn message(shape: &[usize], slices: &[TensorSlice]) -> Option<String> {
        let slices: Vec<_> = slices.iter().collect();
        check("weight", shape, &slices)
            .err()
            .map(|error| error.to_string())
    }

    #[test]
    fn the_element_is_named() {
        let (left, right) = (slice(&[0, 0], &[2, 2]), slice(&[0, 2], &[2, 1]));
        assert_eq!(message(&[2, 3], &[left.clone(), right.clone()]), None);
        let text = message(&[2, 3], &[slice(&[0, 1], &[2, 2]), left.clone()]).unwrap();
        assert!(text.contains("weight") && text.contains("[0, 1]"), "{text}");
        let text = message(&[2, 3], &[left, slice(&[1, 2], &[1, 1])]).unwrap();
        assert!(text.contains("weight") && text.contains("[0, 2]"), "{text}");
        assert_eq!(message(&[], &[slice(&[], &[])]), None);
        assert!(message(&[], &[slice(&[], &[]), slice(&[], &[])]).is_some());
        assert!(message(&[], &[]).is_some());
        assert_eq!(message(&[3, 0], &[]), None);
        assert!(message(&[1], &[]).is_some());
    }

    /// A quadratic algorithm would take hours.
    #[test]
    fn many_boxes_take_a_moment() {
        let columns: Vec<_> = (0..100_000).map(|at| slice(&[0, at], &[7, 1])).collect();
        assert_eq!(message(&[7, 100_000], &columns), None);
        let grid: Vec<_> = (0..30_050)
            .map(|at| slice(&[at / 100, at % 100], &[1, 1]))
            .collect();
        let text = message(&[301, 100], &grid).unwrap();
        assert!(text.contains("[300, 50]"), "{text}");
    }

    proptest! {
        /// The result equals a count of every element.
        #[test]
        fn counting_says_the_same(
            shape in prop::collection::vec(1usize..5, 1..4),
            numbers in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 12),
            count in 0usize..4,
        ) {
            let dims = shape.len();
            let part = |number: usize| {
                let of = |dim: usize| {
                    let (a, b) = &numbers[number * 3 + dim];
                    let start = a.index(shape[dim]);
                    (start, 1 + b.index(shape[dim] - start))
                };
                let (offset, shape): (Vec<_>, Vec<_>) = (0..dims).map(of).unzip();
                TensorSlice { offset, shape }
            };
            let slices: Vec<_> = (0..count).map(part).collect();
            let mut times = vec![0; shape.iter().product()];
            for part in &slices {
                for run in part.runs(&shape) {
                    times[run.in_tensor..run.in_tensor + run.len].iter_mut().for_each(|n| *n += 1);
                }
            }
            let place = |of: &[usize]| of.iter().zip(&shape).fold(0, |at, (i, size)| at * size + i);
            let slices: Vec<_> = slices.iter().collect();
            match check("weight", &shape, &slices) {
                Ok(()) => prop_assert!(times.iter().all(|n| *n == 1)),
                Err(CheckpointError::Overlap { element, .. }) => prop_assert!(times[place(&element)] > 1),
                Err(CheckpointError::Gap { element, .. }) => {
                    prop_assert_eq!(times.iter().position(|n| *n == 0), Some(place(&element)));
                }
                Err(error) => prop_assert!(false, "{}", error),
            }
        }
    }
}
