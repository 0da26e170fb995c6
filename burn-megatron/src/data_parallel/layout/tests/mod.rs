//! Cases computed by hand, most of them with the sizes of Megatron-LM's tests.

use super::*;

mod messages;
mod properties;
mod quantized;

/// Returns a dense parameter, bf16 with f32 gradients.
fn dense(elements: usize) -> ParameterSize {
    ParameterSize {
        quantized_bytes: None,
        elements,
        parameter: DType::BF16,
        gradient: DType::F32,
        grid: Grid::Dense,
        shared: false,
        unit: 0,
    }
}

fn all_dense(sizes: &[usize]) -> Vec<ParameterSize> {
    sizes.iter().copied().map(dense).collect()
}

fn rules(size: Option<usize>, ranks: usize) -> BucketRules {
    BucketRules {
        size,
        ..BucketRules::sharded(ranks)
    }
}

/// Returns the shard of a rank, relative to the start of the bucket.
fn shard(bucket: &Bucket, rank: usize) -> Range<usize> {
    let elements = bucket.shard_elements();
    rank * elements..(rank + 1) * elements
}

fn layout(parameters: &[ParameterSize], rules: &BucketRules) -> BufferLayout {
    BufferLayout::new(parameters, rules).unwrap()
}

/// Returns the number of elements of each bucket of a single buffer, without and with the padding at its end.
fn sizes(layout: &BufferLayout) -> (Vec<usize>, Vec<usize>) {
    assert_eq!(layout.buffers.len(), 1);
    let buckets = layout.buffers[0].buckets.iter();
    buckets
        .map(|bucket| (bucket.used(), bucket.padded()))
        .unzip()
}

/// Returns the range of each parameter of the table.
fn ranges(layout: &BufferLayout) -> Vec<Range<usize>> {
    let count = (0..).map_while(|index| layout.find(index));
    count.map(|location| location.range.clone()).collect()
}

/// Bucket sizes at which ten layers of 95 x 95 are cut.
const CUTS: [Option<usize>; 7] = [
    None,
    Some(9000),
    Some(9025),
    Some(9050),
    Some(18000),
    Some(18050),
    Some(20000),
];

/// Returns ten layers of 95 x 95 with buckets of each size, without and with padding.
fn ten_layers(bias: bool, ranks: usize) -> Vec<(Vec<usize>, Vec<usize>)> {
    let layer: &[usize] = if bias { &[9025, 95] } else { &[9025] };
    let parameters = all_dense(&layer.repeat(10));
    let cut = |size| sizes(&layout(&parameters, &rules(size, ranks)));
    CUTS.map(cut).into()
}

/// Returns `full` buckets of one size, and one of another size.
fn row(full: usize, elements: usize, last: Option<usize>) -> Vec<usize> {
    let mut row = vec![elements; full];
    row.extend(last);
    row
}

#[test]
fn ten_layers_sharded() {
    for (ranks, padded) in [
        (1, [90880, 9088, 18176, 27264]),
        (2, [90880, 9088, 18176, 27264]),
        (3, [91008, 9216, 18432, 27264]),
        (4, [90880, 9088, 18176, 27264]),
        (6, [91008, 9216, 18432, 27264]),
        (8, [90880, 9088, 18176, 27264]),
        (96, [91008, 9216, 18432, 27264]),
    ] {
        let [all, one, two, three] = padded;
        let expected = [
            (row(1, 90817, None), row(1, all, None)),
            (row(10, 9025, None), row(10, one, None)),
            (row(10, 9025, None), row(10, one, None)),
            (row(5, 18113, None), row(5, two, None)),
            (row(5, 18113, None), row(5, two, None)),
            (row(5, 18113, None), row(5, two, None)),
            (row(3, 27201, Some(9025)), row(3, three, Some(one))),
        ];
        assert_eq!(ten_layers(false, ranks), expected, "{ranks} ranks");
    }
}

#[test]
fn ten_layers_with_biases_sharded() {
    let expected = [
        (row(1, 92097, None), row(1, 92160, None)),
        (row(10, 9153, None), row(10, 9216, None)),
        (row(10, 9153, None), row(10, 9216, None)),
        (row(10, 9153, None), row(10, 9216, None)),
        (row(5, 18369, None), row(5, 18432, None)),
        (row(5, 18369, None), row(5, 18432, None)),
        (row(3, 27585, Some(9153)), row(3, 27648, Some(9216))),
    ];
    assert_eq!(ten_layers(true, 8), expected);
}

#[test]
fn a_shared_parameter_comes_last_by_itself() {
    let mut parameters = all_dense(&[9025; 10]);
    parameters[9].shared = true;
    for (size, used) in [
        (None, row(1, 81729, Some(9025))),
        (Some(9000), row(10, 9025, None)),
        (Some(18050), vec![18113, 18113, 18113, 18113, 9025, 9025]),
        (Some(20000), row(3, 27201, Some(9025))),
    ] {
        let layout = layout(&parameters, &rules(size, 8));
        assert_eq!(sizes(&layout).0, used);
        let last = layout.buffers[0].buckets.last().unwrap();
        let last_indices: Vec<_> = last
            .parameters
            .iter()
            .map(|parameter| parameter.index)
            .collect();
        assert_eq!((last.shared, last_indices), (true, vec![9]));
        assert_eq!(
            layout
                .buckets()
                .filter(|(.., bucket)| bucket.shared)
                .count(),
            1
        );
    }
}

#[test]
fn a_shared_parameter_between_others_does_not_cut_them() {
    for shared in 0..4 {
        let mut parameters = all_dense(&[5000; 4]);
        parameters[shared].shared = true;
        let layout = layout(&parameters, &rules(None, 2));
        let buckets = layout.buckets().map(|(.., bucket)| bucket.parameters.len());
        assert_eq!(buckets.collect::<Vec<_>>(), [3, 1]);
        assert_eq!(layout.find(shared).unwrap().bucket, 1);
    }
}

#[test]
fn sharded_parameters_start_at_multiples_of_64() {
    for (first, start) in [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)] {
        let layout = layout(&all_dense(&[7, first]), &rules(None, 2));
        assert_eq!(ranges(&layout)[0], start..start + 7);
    }
    let odd = layout(&all_dense(&[97, 103]), &rules(None, 2));
    assert_eq!(ranges(&odd), [128..225, 0..103]);
    assert_eq!(sizes(&odd), (vec![225], vec![256]));
    let layer = layout(&all_dense(&[16, 4]), &rules(None, 1));
    assert_eq!(ranges(&layer), [64..80, 0..4]);
    let cut = layout(&all_dense(&[5000; 3]), &rules(Some(8000), 2));
    assert_eq!(ranges(&cut), [0..5000, 5056..10056, 0..5000]);
    assert_eq!(sizes(&cut), (vec![10056, 5000], vec![10112, 5120]));
}

#[test]
fn aligned_parameters_are_packed_in_reverse_order() {
    let parameters = all_dense(&[640, 1280, 960]);
    let sharded = layout(&parameters, &rules(None, 1));
    assert_eq!(ranges(&sharded), [2240..2880, 960..2240, 0..960]);
    assert_eq!(sizes(&sharded), (vec![2880], vec![2944]));
}

#[test]
fn bucket_ends_fit_the_ranks() {
    for (ranks, padded) in [
        (1, 128),
        (2, 128),
        (3, 384),
        (4, 128),
        (5, 640),
        (6, 384),
        (8, 128),
        (96, 384),
        (256, 256),
    ] {
        let one = layout(&all_dense(&[1]), &rules(None, ranks));
        assert_eq!(sizes(&one).1, [padded], "{ranks} ranks");
        let full = layout(&all_dense(&[padded]), &rules(None, ranks));
        assert_eq!(sizes(&full).1, [padded], "{ranks} ranks");
    }
    for (ranks, padded) in [(2, 65536), (3, 196_608), (4, 65536)] {
        let rules = BucketRules {
            pad_for_bandwidth: true,
            ..rules(None, ranks)
        };
        let layout = layout(&all_dense(&[1000]), &rules);
        assert_eq!(sizes(&layout), (vec![1000], vec![padded]));
    }
}

#[test]
fn a_device_may_require_more_alignment() {
    let aligned = |bytes, dtype| BucketRules::alignment(bytes, dtype).unwrap();
    assert_eq!(aligned(512, DType::BF16), 256);
    assert_eq!(aligned(512, DType::F32), 128);
    assert_eq!(aligned(512, DType::F64), 64);
    assert_eq!(aligned(32, DType::F32), 64);
    assert_eq!(aligned(1, DType::F32), 64);
    assert_eq!(aligned(96, DType::F32), 192);

    // The alignment applies to the buckets as well as the parameters.
    let rules = BucketRules {
        align: 256,
        ..rules(Some(1), 2)
    };
    let layout = layout(&all_dense(&[100, 300]), &rules);
    assert_eq!(sizes(&layout), (vec![300, 100], vec![512, 256]));
    let starts = layout.buckets().map(|(.., bucket)| bucket.range.start);
    assert_eq!(starts.collect::<Vec<_>>(), [0, 512]);
}

#[test]
fn dtypes_and_experts_have_their_own_buffers() {
    let expert = ParameterSize {
        grid: Grid::Expert,
        ..dense(1000)
    };
    let single = ParameterSize {
        parameter: DType::F32,
        ..dense(10)
    };
    let short = ParameterSize {
        gradient: DType::BF16,
        ..dense(20)
    };
    let parameters = [dense(1000), expert, single, dense(7), short];
    let rules = BucketRules {
        expert_ranks: Some(256),
        ..rules(None, 3)
    };
    let layout = layout(&parameters, &rules);
    let keys = layout.buffers.iter().map(|buffer| buffer.key.to_string());
    assert_eq!(
        keys.collect::<Vec<_>>(),
        [
            "bf16/bf16 dense",
            "bf16/f32 dense",
            "f32/f32 dense",
            "bf16/f32 expert"
        ]
    );
    let elements = layout.buffers.iter().map(|buffer| buffer.elements);
    assert_eq!(elements.collect::<Vec<_>>(), [384, 1152, 384, 1024]);
    let shards = layout.buffers.iter().map(|buffer| buffer.buckets[0].shards);
    assert_eq!(shards.collect::<Vec<_>>(), [3, 3, 3, 256]);
    let buckets = (0..5).map(|index| layout.find(index).unwrap().bucket);
    assert_eq!(buckets.collect::<Vec<_>>(), [3, 2, 1, 3, 0]);
    assert_eq!(layout.buffer_of(2).key, BufferKey::of(&expert));
    assert_eq!(layout.find(5), None);
    assert_eq!(
        (layout.elements(), layout.parameter_elements()),
        (2944, 2037)
    );
}

#[test]
fn a_bucket_ends_where_its_unit_does() {
    let units = [0, 1, 1, 2, 2, 0];
    let parameters = units.map(|unit| ParameterSize { unit, ..dense(10) });
    let layout = layout(&parameters, &rules(None, 2));
    let buckets = layout.buckets().map(|(.., bucket)| {
        let indices = bucket.parameters.iter().map(|parameter| parameter.index);
        (bucket.unit, indices.collect())
    });
    let expected: [(_, Vec<_>); 4] = [(0, vec![5]), (2, vec![4, 3]), (1, vec![2, 1]), (0, vec![0])];
    assert_eq!(buckets.collect::<Vec<_>>(), expected);
}

#[test]
fn empty_parameters_take_no_space() {
    let none = layout(&[], &rules(None, 2));
    assert_eq!(
        (none.buffers.len(), none.bucket_count(), none.elements()),
        (0, 0, 0)
    );
    let empty = layout(&all_dense(&[0, 0]), &rules(None, 3));
    assert_eq!((empty.bucket_count(), empty.elements()), (1, 0));
    assert_eq!(shard(empty.bucket(0), 2), 0..0);
    let between = layout(&all_dense(&[64, 0, 64]), &rules(None, 1));
    assert_eq!(ranges(&between), [64..128, 64..64, 0..64]);
    let slices = between.bucket(0).slices(63..65);
    let indices: Vec<_> = slices.iter().map(|slice| slice.index).collect();
    assert_eq!(indices, [2, 0]);
}

#[test]
fn a_parameter_may_lie_in_several_shards() {
    let layout = layout(&all_dense(&[100, 10]), &rules(None, 4));
    let bucket = layout.bucket(0);
    assert_eq!(shard(bucket, 2), 128..192);
    assert_eq!(bucket.padded(), 256);
    let slices = |rank| bucket.slices(shard(bucket, rank));
    let slice = |index, parameter_range, local_range| ParameterSlice {
        index,
        parameter_range,
        local_range,
    };
    assert_eq!(slices(0), [slice(1, 0..10, 0..10)]);
    assert_eq!(slices(1), [slice(0, 0..64, 0..64)]);
    assert_eq!(slices(2), [slice(0, 64..100, 0..36)]);
    assert_eq!(slices(3), []);
    assert_eq!(
        bucket.slices(5..70),
        [slice(1, 5..10, 0..5), slice(0, 0..6, 59..65)]
    );
}

#[test]
fn the_default_size_grows_with_the_ranks() {
    for (ranks, size) in [(1, 40_000_000), (40, 40_000_000), (41, 41_000_000)] {
        assert_eq!(BucketRules::default_size(ranks), size);
    }
    assert_eq!(BucketRules::default_size(usize::MAX), usize::MAX);
}
