//! FP8 weights.

use super::*;

fn codes(elements: usize) -> ParameterSize {
    ParameterSize {
        parameter: DType::U8,
        quantized_bytes: Some(3 * elements),
        ..dense(elements)
    }
}

#[test]
fn fp8_weights_have_their_own_buffers() {
    let blocks = ParameterSize {
        quantized_bytes: Some(5),
        ..dense(50)
    };
    let parameters = [dense(10), codes(300), blocks, dense(20), codes(7)];
    let layout = layout(&parameters, &rules(None, 2));
    let of = |buffer: &FlatBuffer| (buffer.key.to_string(), buffer.quantized_bytes);
    let expected = [
        ("u8/f32 dense fp8", 921),
        ("bf16/f32 dense", 0),
        ("bf16/f32 dense fp8", 5),
    ];
    let found: Vec<_> = layout.buffers.iter().map(of).collect();
    assert_eq!(found, expected.map(|(key, bytes)| (key.to_string(), bytes)));
    // Backward finishes the codes last, except for the first parameter.
    let buckets = (0..5).map(|index| layout.find(index).unwrap().bucket);
    assert_eq!(buckets.collect::<Vec<_>>(), [2, 1, 0, 2, 1]);
}

/// Other parameters only need multiples of 128 elements. Each rank has complete groups of four words of codes.
#[test]
fn shards_of_codes_are_whole_words() {
    for ranks in [1, 3, 8, 64, 100] {
        for (size, multiple) in [(dense(10), 1), (codes(10), 16)] {
            let layout = layout(&[size], &rules(None, ranks));
            let bucket = layout.bucket(0);
            assert_eq!(bucket.shard_elements() % multiple, 0, "{ranks} ranks");
            assert_eq!(bucket.padded() % 128, 0);
            let floats = ranks == 64 && multiple == 1;
            assert!(!floats || bucket.shard_elements() == 2);
        }
    }
}
