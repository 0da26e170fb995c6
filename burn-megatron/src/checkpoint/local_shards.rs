//! Which slices of a parameter a rank holds, and where they are in its local tensor. Pure values.

use std::ops::Range;

use super::TensorSlice;
use crate::mesh::AxisRank;
use crate::nn::{ParameterEntry, Placement};

/// A slice of a parameter that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalShard {
    /// Its place in the whole parameter.
    pub global: TensorSlice,
    /// Its place in the rank's local tensor.
    pub local: TensorSlice,
    /// Whether this is the first rank of the tensor axis that holds the slice.
    pub is_first: bool,
}

/// The slices in a flat range of the local tensor that the rank at `place` has of a parameter. Padding is
/// in none of them.
pub fn local_shards(
    entry: &ParameterEntry,
    place: AxisRank,
    range: Range<usize>,
) -> Vec<LocalShard> {
    let shape = entry.local_shape(place);
    let slices = TensorSlice::from_flat_range(&shape, range);
    let Placement::Split { dim, .. } = &entry.placement else {
        let whole = slices.into_iter().map(|part| LocalShard {
            global: part.clone(),
            local: part,
            is_first: place.index == 0,
        });
        return whole.collect();
    };
    let ranges = entry.placement.ranges(place).into_iter();
    let sections = entry.placement.local_sections(place).into_iter();
    let sections: Vec<_> = ranges.zip(sections).collect();
    let mut found = vec![];
    for part in slices {
        for (in_whole, (in_part, section)) in &sections {
            // Beyond the end of the whole parameter there is only padding.
            let real = in_whole.end.min(entry.shape[*dim]);
            let len = real.saturating_sub(in_whole.start);
            let mut of_section = TensorSlice::whole(&shape);
            (of_section.offset[*dim], of_section.shape[*dim]) = (in_part.start, len);
            let Some(part) = part.intersection(&of_section) else {
                continue;
            };
            let mut whole = part.clone();
            whole.offset[*dim] = part.offset[*dim] - in_part.start + in_whole.start;
            found.push(LocalShard {
                global: whole,
                local: part,
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
            sum_over_tensor: false,
            decay: true,
            tied_across_pipeline: false,
            stage: 0,
        }
    }

    proptest! {
        /// Over all ranks and ranges each element is a first replica once, at the index that the placement gives.
        #[test]
        fn first_holders_have_each_element_once(
            dim in 0usize..3, ranks in prop::sample::select(vec![1usize, 2, 4]), cuts in 1usize..5,
        ) {
            let mut shape = [3, 2, 5];
            // Queries, two groups of keys and of values; or a padded vocabulary.
            let sections = [(8, ranks), (4, ranks.min(2)), (4, ranks.min(2))]
                .map(|(size, parts)| Section { size, parts })
                .to_vec();
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
                    let place = AxisRank { index, size: ranks };
                    let part = entry.placement.part(&shape, &whole, place);
                    let local = entry.local_shape(place);
                    for cut in 0..cuts {
                        let range = part.len() * cut / cuts..part.len() * (cut + 1) / cuts;
                        for shard in local_shards(&entry, place, range) {
                            let runs = shard.global.runs(&shape);
                            let whole = runs.iter().flat_map(|r| r.in_tensor..r.in_tensor + r.len);
                            let runs = shard.local.runs(&local);
                            let own = runs.iter().flat_map(|r| r.in_tensor..r.in_tensor + r.len);
                            for (whole, own) in whole.zip(own) {
                                prop_assert_eq!(part[own], whole);
                                times[whole] += usize::from(shard.is_first);
                            }
                        }
                    }
                }
                prop_assert!(times.iter().all(|times| *times == 1));
            }
        }
    }
}
