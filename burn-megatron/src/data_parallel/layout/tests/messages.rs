//! Error messages of invalid rules, and the displayed table.

use super::*;

#[test]
fn errors_name_the_valid_range() {
    let refusal = |rules| BufferLayout::new(&all_dense(&[10]), &rules).unwrap_err();
    let sharded = BucketRules::sharded(2);
    let cases = [
        (
            BucketRules {
                ranks: 0,
                ..sharded
            },
            "invalid number of ranks = 0 for the buckets of dense parameters: expected at least 1",
        ),
        (
            BucketRules {
                expert_ranks: Some(0),
                ..sharded
            },
            "invalid number of ranks = 0 for the buckets of expert parameters: expected at least 1",
        ),
        (
            BucketRules {
                size: Some(0),
                ..sharded
            },
            "invalid bucket size: 0 elements, expected at least 1 (the default is 40000000), or no size for \
             one bucket",
        ),
        (
            BucketRules {
                align: 0,
                ..sharded
            },
            "invalid alignment: 0 elements, expected at least 1 (packed)",
        ),
    ];
    for (rules, message) in cases {
        assert_eq!(refusal(rules).to_string(), message);
    }
    assert_eq!(
        refusal(BucketRules {
            ranks: usize::MAX,
            ..sharded
        }),
        LayoutError::PaddingOverflow {
            ranks: usize::MAX,
            align: 64
        }
    );
    assert_eq!(
        BucketRules::alignment(0, DType::F32),
        Err(LayoutError::ZeroAlign)
    );
}

#[test]
fn buffers_that_cannot_be_allocated_are_refused() {
    let limit = isize::MAX as usize / 4;
    for (sizes, index) in [
        (vec![limit], 0),
        (vec![1, limit & !127], 0),
        (vec![limit, 1], 0),
        (vec![usize::MAX, 1], 0),
        (vec![3, usize::MAX, 5], 1),
    ] {
        let elements = sizes[index];
        let error = BufferLayout::new(&all_dense(&sizes), &rules(None, 2));
        let key = BufferKey::of(&dense(0));
        let expected = LayoutError::BufferTooLarge {
            index,
            elements,
            key,
            limit,
        };
        assert_eq!(error, Err(expected));
    }
    // Each bucket is within the limit, but the buffer is not.
    let halves = all_dense(&[limit / 2 + 1; 2]);
    let error = BufferLayout::new(&halves, &rules(Some(1), 2));
    assert!(
        matches!(error, Err(LayoutError::BufferTooLarge { index: 0, .. })),
        "{error:?}"
    );
    // Each buffer is within the limit, but the sum of all buffers is not.
    let types = [DType::U8, DType::F16, DType::BF16, DType::F32];
    let parameters = types.map(|dtype| ParameterSize {
        elements: (isize::MAX as usize / dtype.size_of()) & !127,
        parameter: dtype,
        gradient: dtype,
        ..dense(0)
    });
    let error = BufferLayout::new(&parameters, &rules(None, 2));
    assert_eq!(error, Err(LayoutError::ElementCountOverflow { buffers: 4 }));
}

#[test]
fn the_table_shows_every_bucket() {
    let mut parameters = all_dense(&[100, 10, 300]);
    parameters[0].shared = true;
    parameters[2].unit = 1;
    let layout = layout(&parameters, &rules(None, 4));
    insta::assert_snapshot!(layout, @"
    bucket                 buffer  unit  parameters  elements  padded
    0              bf16/f32 dense     1           1       300     384
    1              bf16/f32 dense     0           1        10     128
    2       bf16/f32 dense shared     0           1       100     128
    total                                         3       410     640
    ");
}
