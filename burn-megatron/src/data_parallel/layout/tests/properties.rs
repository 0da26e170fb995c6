//! Properties of random layouts, checked element by element.

use proptest::prelude::*;

use super::*;

fn parameters() -> impl Strategy<Value = Vec<ParameterSize>> {
    let dtype = prop::sample::select(vec![DType::F32, DType::BF16]);
    let size = (
        0..300usize,
        dtype,
        prop::sample::select(vec![Grid::Dense, Grid::Dense, Grid::Dense, Grid::Expert]),
        prop::bool::weighted(0.2),
        0..3usize,
    );
    let size = size.prop_map(|(elements, parameter, grid, shared, unit)| ParameterSize {
        elements,
        parameter,
        grid,
        shared,
        unit,
        quantized_bytes: None,
        gradient: DType::F32,
    });
    prop::collection::vec(size, 0..12)
}

fn some_rules() -> impl Strategy<Value = BucketRules> {
    let align = prop::sample::select(vec![1, 3, 64, 256]);
    let size = prop::option::of(1..900usize);
    let ranks = (1..9usize, prop::option::of(1..9usize));
    (size, ranks, any::<bool>(), align).prop_map(
        |(size, (ranks, expert_ranks), pad_for_bandwidth, align)| BucketRules {
            size,
            ranks,
            expert_ranks,
            pad_for_bandwidth,
            align,
        },
    )
}

proptest! {
    #[test]
    fn every_element_lies_in_one_place(parameters in parameters(), rules in some_rules()) {
        let layout = layout(&parameters, &rules);
        let mut owners: Vec<_> = layout.buffers.iter().map(|b| vec![None; b.elements]).collect();
        let mut seen = vec![0; parameters.len()];
        for (buffer, owners) in layout.buffers.iter().zip(&mut owners) {
            for bucket in &buffer.buckets {
                for BucketParameter { index, range } in &bucket.parameters {
                    let size = &parameters[*index];
                    seen[*index] += 1;
                    prop_assert_eq!(BufferKey::of(size), buffer.key);
                    prop_assert_eq!(range.len(), size.elements);
                    prop_assert_eq!(range.start % rules.align, 0);
                    prop_assert!(range.end <= bucket.padded());
                    for element in range.clone() {
                        let owner = &mut owners[bucket.range.start + element];
                        prop_assert_eq!(owner.replace(*index), None);
                    }
                }
            }
        }
        prop_assert!(seen.iter().all(|times| *times == 1));
        let elements: usize = parameters.iter().map(|size| size.elements).sum();
        prop_assert_eq!(layout.parameter_elements(), elements);
    }

    #[test]
    fn buckets_follow_the_rules(parameters in parameters(), rules in some_rules()) {
        let layout = layout(&parameters, &rules);
        for buffer in &layout.buffers {
            let ranks = match buffer.key.grid {
                Grid::Dense => None,
                Grid::Expert => rules.expert_ranks,
            };
            let ranks = ranks.unwrap_or(rules.ranks);
            let mut end = 0;
            let mut walk = vec![];
            for bucket in &buffer.buckets {
                prop_assert_eq!(bucket.range.start, end);
                end = bucket.range.end;
                prop_assert_eq!(end % rules.align, 0);
                prop_assert_eq!((end % 128, end % ranks), (0, 0));
                prop_assert!(!rules.pad_for_bandwidth || end % 65536 == 0);
                let (last, before) = bucket.parameters.split_last().unwrap();
                for parameter in &bucket.parameters {
                    prop_assert_eq!(parameters[parameter.index].unit, bucket.unit);
                    prop_assert_eq!(parameters[parameter.index].shared, bucket.shared);
                    walk.push((bucket.shared, std::cmp::Reverse(parameter.index)));
                }
                // Only the last parameter may have filled the bucket.
                let full = |parameter: &BucketParameter| rules.size.is_some_and(|size| parameter.range.end >= size);
                prop_assert!(!before.iter().any(full));
                prop_assert!(!bucket.shared || bucket.parameters.len() == 1);
                prop_assert_eq!(bucket.used(), last.range.end);
            }
            prop_assert_eq!(end, buffer.elements);
            prop_assert!(walk.is_sorted());
            // Adjacent buckets were separated for a reason.
            for pair in buffer.buckets.windows(2) {
                let full = rules.size.is_some_and(|size| pair[0].used() >= size);
                prop_assert!(full || pair[0].unit != pair[1].unit || pair[1].shared);
            }
        }
    }

    #[test]
    fn lookups_agree(parameters in parameters(), rules in some_rules()) {
        let layout = layout(&parameters, &rules);
        let all = layout.buffers.iter().flat_map(|buffer| &buffer.buckets);
        let mut all: Vec<_> = all.collect();
        // Backward finishes a bucket when it has reached the bucket's first parameter in the table.
        all.sort_by_key(|bucket| {
            let first = bucket.parameters.iter().map(|parameter| parameter.index).min();
            (bucket.shared, std::cmp::Reverse(first))
        });
        prop_assert_eq!(all.len(), layout.bucket_count());
        for (number, buffer, bucket) in layout.buckets() {
            prop_assert_eq!(bucket, all[number]);
            prop_assert!(buffer.buckets.contains(bucket));
            for parameter in &bucket.parameters {
                let location = layout.find(parameter.index).unwrap();
                prop_assert_eq!((location.bucket, &location.range), (number, &parameter.range));
            }
        }
        prop_assert_eq!(layout.find(parameters.len()), None);
    }

    /// Values that pass through the shards of all ranks are complete afterwards.
    #[test]
    fn shards_hold_every_parameter(parameters in parameters(), rules in some_rules()) {
        let layout = layout(&parameters, &rules);
        let mut whole: Vec<_> = parameters.iter().map(|size| vec![0; size.elements]).collect();
        for (_, buffer, bucket) in layout.buckets() {
            let mut flat = vec![usize::MAX; bucket.padded()];
            for parameter in &bucket.parameters {
                for (element, value) in flat[parameter.range.clone()].iter_mut().enumerate() {
                    *value = parameter.index * 1000 + element;
                }
            }
            let mut end = 0;
            for rank in 0..bucket.shards {
                let shard = shard(bucket, rank);
                prop_assert_eq!((shard.start, shard.len()), (end, bucket.shard_elements()));
                end = shard.end;
                let values = &flat[shard.clone()];
                let slices = bucket.slices(shard);
                for ParameterSlice { index, parameter_range, local_range } in &slices {
                    prop_assert!(!local_range.is_empty());
                    let target = &mut whole[*index][parameter_range.clone()];
                    for (target, value) in target.iter_mut().zip(&values[local_range.clone()]) {
                        *target += value;
                    }
                }
                // Elements that are in no slice are padding.
                let covered: usize = slices.iter().map(|slice| slice.local_range.len()).sum();
                let padding = values.iter().filter(|value| **value == usize::MAX).count();
                prop_assert_eq!(covered + padding, values.len());
            }
            prop_assert_eq!(end, bucket.padded());
            prop_assert!(buffer.shard_elements() * bucket.shards == buffer.elements);
        }
        for (index, values) in whole.iter().enumerate() {
            let expected: Vec<_> = (0..values.len()).map(|e| index * 1000 + e).collect();
            prop_assert_eq!(values, &expected);
        }
    }

    /// The slices of any range contain its elements one by one.
    #[test]
    fn pieces_of_any_stretch(
        parameters in parameters(),
        rules in some_rules(),
        (bucket, from, to) in any::<(prop::sample::Index, prop::sample::Index, prop::sample::Index)>(),
    ) {
        let layout = layout(&parameters, &rules);
        prop_assume!(layout.bucket_count() > 0);
        let bucket = layout.bucket(bucket.index(layout.bucket_count()));
        let start = from.index(bucket.padded() + 1);
        let end = start + to.index(bucket.padded() - start + 1);
        let slices = bucket.slices(start..end);
        let listed = slices.iter().flat_map(|slice| {
            let elements = slice.parameter_range.clone().zip(slice.local_range.clone());
            elements.map(|(element, place)| (slice.index, element, place))
        });
        let expected = bucket.parameters.iter().flat_map(|parameter| {
            let inside = parameter.range.clone().filter(|place| (start..end).contains(place));
            inside.map(|place| (parameter.index, place - parameter.range.start, place - start))
        });
        prop_assert_eq!(listed.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        prop_assert!(slices.iter().all(|slice| slice.parameter_range.len() == slice.local_range.len()));
    }
}
