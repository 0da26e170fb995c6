//! The slices of a parameter that a rank holds, and their positions in the local tensor of the rank.

use std::ops::Range;

use super::{MeshRank, ParameterEntry, TensorSlice};

/// A slice of a parameter that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalShard {
    /// The position of the slice in the full parameter.
    pub global: TensorSlice,
    /// The position of the slice in the local tensor of the rank.
    pub local: TensorSlice,
    /// Whether this rank holds the first replica of the slice on each axis that splits the parameter.
    pub is_first: bool,
}

/// Returns the slices of a parameter that lie in the range `range` of the flattened local tensor of `rank`. The slices
/// do not contain padding.
pub fn local_shards(
    entry: &ParameterEntry,
    rank: &MeshRank,
    range: Range<usize>,
) -> Vec<LocalShard> {
    let shape = entry.local_shape(rank);
    let slices = TensorSlice::from_flat_range(&shape, range).into_iter();
    let mut shards: Vec<_> = slices
        .map(|slice| LocalShard {
            global: slice.clone(),
            local: slice,
            is_first: true,
        })
        .collect();
    for (axis, dim, _) in entry.placements.splits() {
        let place = rank.on(entry.grid, axis);
        let sections = entry.placements.on(axis).local_sections(place);
        let mut found = vec![];
        for shard in &shards {
            for section in &sections {
                // There is only padding beyond the end of the full parameter.
                let real = section.whole.end.min(entry.shape[dim]);
                let len = real.saturating_sub(section.whole.start);
                let mut of_section = TensorSlice::whole(&shape);
                (of_section.offset[dim], of_section.shape[dim]) = (section.local.start, len);
                let Some(local) = shard.local.intersection(&of_section) else {
                    continue;
                };
                let mut global = shard.global.clone();
                global.shape.clone_from(&local.shape);
                global.offset[dim] = local.offset[dim] - section.local.start + section.whole.start;
                found.push(LocalShard {
                    global,
                    local,
                    is_first: shard.is_first && section.section.is_first_replica(place),
                });
            }
        }
        shards = found;
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Axis, Mesh, ParallelConfig};
    use crate::nn::{Placement, Section};
    use proptest::prelude::*;
    use std::sync::Arc;

    proptest! {
        /// Each element has exactly one first replica over all ranks and ranges, at the index that the placement
        /// gives.
        #[test]
        fn first_holders_have_each_element_once(
            dim in 0usize..3, ranks in prop::sample::select(vec![1usize, 2, 4]), cuts in 1usize..5,
        ) {
            let mut shape = [3, 2, 5];
            // The parameters are a QKV weight with two key-value heads, and a padded vocabulary.
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
                let mut entry = ParameterEntry::replicated("weight", shape.to_vec());
                entry.placements = (Axis::Tensor, placement).into();
                let mesh = Mesh::new(&ParallelConfig::new().with_tensor(ranks), ranks).unwrap();
                let mesh = Arc::new(mesh);
                let len: usize = shape.iter().product();
                let whole: Vec<usize> = (0..len).collect();
                let mut times = vec![0; len];
                for index in 0..ranks {
                    let rank = MeshRank::new(mesh.clone(), index);
                    let part = entry.part(&whole, &rank);
                    let local = entry.local_shape(&rank);
                    for cut in 0..cuts {
                        let range = part.len() * cut / cuts..part.len() * (cut + 1) / cuts;
                        for shard in local_shards(&entry, &rank, range) {
                            let runs = shard.global.runs(&shape);
                            let whole = runs.iter().flat_map(|r| r.in_tensor..r.in_tensor + r.len);
                            let runs = shard.local.runs(&local);
                            let own = runs.iter().flat_map(|r| r.in_tensor..r.in_tensor + r.len);
                            for (whole, own) in whole.zip(own) {
                                prop_assert_eq!(part[own], whole);
                                times[whole] += usize::from(shard.is_first && entry.counts_on(&rank));
                            }
                        }
                    }
                }
                prop_assert!(times.iter().all(|times| *times == 1));
            }
        }
    }
}
