//! Whether boxes make up a tensor: each element in one of them.

use std::collections::BTreeSet;

use super::{CheckpointError, Slice};

/// Checks that each element of a tensor lies in one of these boxes. They fit its shape, whose product is
/// a `usize`, and none is empty.
///
/// # Errors
///
/// [`CheckpointError::Overlap`] and [`CheckpointError::Gap`], with the element.
pub fn check(key: &str, shape: &[usize], boxes: &[&Slice]) -> Result<(), CheckpointError> {
    if let Some((first, second, both)) = overlap(shape, boxes) {
        return Err(CheckpointError::Overlap {
            key: key.into(),
            first: first.clone(),
            second: second.clone(),
            element: both.offset,
        });
    }
    match gap(shape, boxes) {
        None => Ok(()),
        Some(element) => Err(CheckpointError::Gap {
            key: key.into(),
            element,
        }),
    }
}

/// Two boxes that have something in common, and what.
fn overlap<'a>(shape: &[usize], boxes: &[&'a Slice]) -> Option<(&'a Slice, &'a Slice, Slice)> {
    // Boxes are compared with those that share a place of one dim with them: the dim that keeps the most
    // of them apart.
    let places = |dim: usize| {
        let starts = boxes.iter().map(|part| part.offset[dim]);
        starts.collect::<BTreeSet<_>>().len()
    };
    let Some(dim) = (0..shape.len()).max_by_key(|dim| places(*dim)) else {
        let both = boxes.first().zip(boxes.get(1));
        return both.map(|(first, second)| (*first, *second, Slice::whole(&[])));
    };
    let mut sorted = boxes.to_vec();
    sorted.sort_by_key(|part| part.offset[dim]);
    let mut open: Vec<&Slice> = vec![];
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

fn meet(a: &Slice, b: &Slice, dim: usize) -> bool {
    a.offset[dim] < b.range(dim).end && b.offset[dim] < a.range(dim).end
}

/// The first element that lies in none of these boxes, which have nothing in common.
fn gap(shape: &[usize], boxes: &[&Slice]) -> Option<Vec<usize>> {
    let mut boxes = boxes.to_vec();
    let mut element = vec![];
    let volume = |part: &&Slice, from: usize| part.shape[from..].iter().product::<usize>();
    let full = |boxes: &[&Slice], from: usize| {
        let volumes = boxes.iter().map(|part| volume(part, from) as u128);
        volumes.sum::<u128>() == shape[from..].iter().product::<usize>() as u128
    };
    if full(&boxes, 0) {
        return None;
    }
    for (dim, len) in shape.iter().enumerate() {
        // Between two of these places nothing changes.
        let mut places: BTreeSet<usize> = boxes.iter().map(|part| part.range(dim).end).collect();
        places.insert(0);
        places.extend(boxes.iter().map(|part| part.offset[dim]));
        let at = |place: usize| {
            let boxes = boxes.iter().copied();
            let there = boxes.filter(|part| part.range(dim).contains(&place));
            there.collect::<Vec<_>>()
        };
        let found = places
            .into_iter()
            .filter(|place| place < len)
            .map(|place| (place, at(place)))
            .find(|(_, there)| !full(there, dim + 1));
        // What is not full has a place that is not full.
        let (place, there) = found?;
        element.push(place);
        boxes = there;
    }
    Some(element)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    fn slice(offset: &[usize], shape: &[usize]) -> Slice {
        Slice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        }
    }

    fn message(shape: &[usize], boxes: &[Slice]) -> Option<String> {
        let boxes: Vec<_> = boxes.iter().collect();
        check("weight", shape, &boxes)
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

    #[test]
    fn many_boxes_take_a_moment() {
        let begin = Instant::now();
        let columns: Vec<_> = (0..100_000).map(|at| slice(&[0, at], &[7, 1])).collect();
        assert_eq!(message(&[7, 100_000], &columns), None);
        let grid = (0..30_050).map(|at| slice(&[at / 100, at % 100], &[1, 1]));
        let grid: Vec<_> = grid.collect();
        let text = message(&[301, 100], &grid).unwrap();
        assert!(text.contains("[300, 50]"), "{text}");
        // What grows with the square of the boxes takes hours.
        assert!(begin.elapsed() < Duration::from_secs(60));
    }

    proptest! {
        /// The answer is that of counting every element.
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
                Slice { offset, shape }
            };
            let boxes: Vec<_> = (0..count).map(part).collect();
            let mut times = vec![0; shape.iter().product()];
            for part in &boxes {
                for run in part.runs(&shape) {
                    times[run.in_tensor..run.in_tensor + run.len].iter_mut().for_each(|n| *n += 1);
                }
            }
            let place = |of: &[usize]| of.iter().zip(&shape).fold(0, |at, (i, size)| at * size + i);
            let boxes: Vec<_> = boxes.iter().collect();
            match check("weight", &shape, &boxes) {
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
