//! Which boxes of a whole parameter a rank holds, and where they lie in its own part. Pure values.

use std::ops::Range;

use super::Slice;
use crate::mesh::Place;
use crate::nn::{ParameterEntry, Placement};

/// A box that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// In the whole parameter.
    pub whole: Slice,
    /// In the rank's part.
    pub part: Slice,
    /// Whether this is the first rank of the tensor axis that holds it.
    pub is_first: bool,
}

/// The boxes in a stretch of the flattened part of a parameter that the rank at `place` has. What is
/// padding is in none.
pub fn held(entry: &ParameterEntry, place: Place, stretch: Range<usize>) -> Vec<Held> {
    let shape = entry.local_shape(place);
    let boxes = Slice::of_stretch(&shape, stretch);
    let Placement::Split { dim, .. } = &entry.placement else {
        let whole = boxes.into_iter().map(|part| Held {
            whole: part.clone(),
            part,
            is_first: place.index == 0,
        });
        return whole.collect();
    };
    let stretches = entry.placement.ranges(place).into_iter();
    let sections = entry.placement.local_sections(place).into_iter();
    let sections: Vec<_> = stretches.zip(sections).collect();
    let mut found = vec![];
    for part in boxes {
        for (in_whole, (in_part, section)) in &sections {
            // Beyond the end of the whole parameter is padding.
            let real = in_whole.end.min(entry.shape[*dim]);
            let len = real.saturating_sub(in_whole.start);
            let mut of_section = Slice::whole(&shape);
            (of_section.offset[*dim], of_section.shape[*dim]) = (in_part.start, len);
            let Some(part) = part.intersection(&of_section) else {
                continue;
            };
            let mut whole = part.clone();
            whole.offset[*dim] = part.offset[*dim] - in_part.start + in_whole.start;
            found.push(Held {
                whole,
                part,
                is_first: section.is_first_replica(place),
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Section;
    use proptest::prelude::*;

    fn entry(shape: &[usize], placement: Placement) -> ParameterEntry {
        ParameterEntry {
            path: "weight".into(),
            shape: shape.to_vec(),
            placement,
            partial_gradient: false,
            decay: true,
            at_both_ends: false,
            stage: 0,
        }
    }

    proptest! {
        /// Over all ranks and stretches each element is written once, and lies where the placement has it.
        #[test]
        fn first_holders_have_each_element_once(
            dim in 0usize..3, ranks in prop::sample::select(vec![1usize, 2, 4]), cuts in 1usize..5,
        ) {
            let mut shape = [3, 2, 5];
            // Queries, two groups of keys and of values; or a padded vocabulary.
            let sections = [(8, ranks), (4, ranks.min(2)), (4, ranks.min(2))];
            let sections: Vec<_> = sections.map(|(size, parts)| Section { size, parts }).to_vec();
            let cases = [
                (16, Placement::Split { dim, sections }),
                (13, Placement::split(dim, 16, ranks)),
                (5, Placement::Replicated),
            ];
            for (size, placement) in cases {
                shape[dim] = size;
                let entry = entry(&shape, placement);
                let len: usize = shape.iter().product();
                let whole: Vec<usize> = (0..len).collect();
                let mut times = vec![0; len];
                for index in 0..ranks {
                    let place = Place { index, size: ranks };
                    let part = entry.placement.part(&shape, &whole, place);
                    let local = entry.local_shape(place);
                    for cut in 0..cuts {
                        let stretch = part.len() * cut / cuts..part.len() * (cut + 1) / cuts;
                        for held in held(&entry, place, stretch) {
                            let runs = held.whole.runs(&shape);
                            let whole = runs.iter().flat_map(|r| r.in_tensor..r.in_tensor + r.len);
                            let runs = held.part.runs(&local);
                            let own = runs.iter().flat_map(|r| r.in_tensor..r.in_tensor + r.len);
                            for (whole, own) in whole.zip(own) {
                                prop_assert_eq!(part[own], whole);
                                times[whole] += usize::from(held.is_first);
                            }
                        }
                    }
                }
                prop_assert!(times.iter().all(|times| *times == 1));
            }
        }
    }
}
