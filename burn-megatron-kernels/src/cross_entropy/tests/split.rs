//! Tests the three operations on a sharded vocabulary: values, statistics, and reuse of memory.

use proptest::prelude::*;

use super::*;

/// Returns the loss and the gradient for an upstream gradient of ones. The vocabulary is split into shards of `width`
/// columns.
fn split(
    logits: &[f64],
    tokens: usize,
    width: usize,
    parts: usize,
    targets: &[i64],
    options: &CrossEntropyOptions,
    on: (&Device, DType),
) -> (Vec<f64>, Vec<f64>) {
    let rows = targets.len();
    // Padding has values that must not be used.
    let cut = |rank: usize| {
        let entry = |i: usize| {
            let (row, column) = (i / width, rank * width + i % width);
            if column < tokens {
                logits[row * tokens + column]
            } else {
                1e4
            }
        };
        let values: Vec<_> = (0..rows * width).map(entry).collect();
        tensor(&values, width, on)
    };
    let target = || ints(targets, on.0);
    let part = |rank| VocabularyShard {
        first: rank * width,
        tokens,
    };
    let all = (0..parts).map(|rank| statistics(cut(rank), target(), &part(rank)));
    let all = Tensor::stack::<3>(all.collect(), 0);
    let (loss, lse) = combine(all, target(), tokens, options);
    let seed = Tensor::ones([rows], (on.0, loss.dtype()));
    let mut whole = vec![0.0; rows * tokens];
    for rank in 0..parts {
        let (lse, seed) = (lse.clone(), seed.clone());
        let part = gradient(cut(rank), target(), lse, seed, &part(rank), options);
        for (i, value) in values(part).into_iter().enumerate() {
            let (row, column) = (i / width, rank * width + i % width);
            if column < tokens {
                whole[row * tokens + column] = value
            } else {
                assert_eq!(value, 0.0, "padding has no gradient")
            }
        }
    }
    (values(loss), whole)
}

fn assert_near(what: &str, expected: &[f64], actual: &[f64], tolerance: f64) {
    assert_eq!(expected.len(), actual.len());
    for (i, (expected, actual)) in expected.iter().zip(actual).enumerate() {
        let near = (expected - actual).abs() <= tolerance * expected.abs().max(1.0);
        let both = expected.is_nan() && actual.is_nan();
        assert!(
            near || both,
            "{what}: element {i} is {actual}, not {expected}"
        );
    }
}

#[test]
fn a_split_vocabulary_gives_the_whole_loss_and_gradient() {
    // For the case (5, 4), the last shards contain only padding.
    let tokens = 11;
    let targets = [0, 10, 4, 3, -1, 11, 7, 8];
    let logits = Input::wave([8, tokens], 0.3).values;
    for options in [options(0.0, 0.0, Some(-1)), options(0.1, 0.01, Some(-1))] {
        let (device, f64s) = (Device::flex(), DType::F64);
        let on = (&device, f64s);
        let (loss, gradient) = split(&logits, tokens, tokens, 1, &targets, &options, on);
        let expected = evaluate(
            &[Input {
                shape: vec![8, tokens],
                values: logits.clone(),
            }],
            &device,
            f64s,
            f64s,
            &flat(composed::cross_entropy, tokens, &targets, &options),
        );
        assert_near("the whole", &expected.output, &loss, 1e-14);
        for (parts, width) in [
            (1, 11),
            (1, 16),
            (2, 6),
            (3, 4),
            (3, 5),
            (5, 3),
            (5, 4),
            (5, 8),
        ] {
            let split = split(&logits, tokens, width, parts, &targets, &options, on);
            let what = format!("{parts} parts of {width}");
            assert_near(&what, &loss, &split.0, 1e-14);
            assert_near(&what, &gradient, &split.1, 1e-14);
        }
        for (device, _) in devices() {
            for (parts, width) in [(1, 11), (1, 16), (2, 6), (3, 5), (5, 4), (5, 8)] {
                let on = (&device, DType::F32);
                let split = split(&logits, tokens, width, parts, &targets, &options, on);
                let what = format!("{parts} parts of {width} on {device:?}");
                assert_near(&what, &loss, &split.0, 2e-6);
                assert_near(&what, &gradient, &split.1, 2e-6);
            }
        }
    }
}

#[test]
fn the_statistics_are_those_documented() {
    for (device, _) in devices() {
        let logits = tensor(
            &[1.0, 3.0, 2.0, 9.0, 0.0, -1.0, 0.0, 9.0],
            4,
            (&device, DType::F32),
        );
        let part = VocabularyShard {
            first: 5,
            tokens: 8,
        };
        let all = values(statistics(logits.clone(), ints(&[7, 1], &device), &part));
        let sum = |x: [f64; 3]| x.iter().map(|x| x.exp()).sum::<f64>();
        let first = [3.0, sum([-2.0, 0.0, -1.0]), 2.0, 6.0];
        let second = [0.0, sum([0.0, -1.0, 0.0]), 0.0, -1.0];
        assert_near("statistics", &[first, second].concat(), &all, 1e-6);
        let part = VocabularyShard {
            first: 9,
            tokens: 8,
        };
        let none = values(statistics(logits, ints(&[7, 1], &device), &part));
        let lowest = [f64::from(f32::MIN), 0.0, 0.0, 0.0];
        assert_eq!(none, [lowest, lowest].concat());
    }
}

#[test]
fn the_gradient_reuses_the_memory_of_uniquely_owned_logits() {
    for (device, _) in devices() {
        let logits = tensor(&Input::wave([2, 40], 0.1).values, 40, (&device, DType::F32));
        let before = values(logits.clone());
        let part = VocabularyShard {
            first: 0,
            tokens: 40,
        };
        let run = |logits| {
            let row = Tensor::<1>::ones([2], &device);
            let targets = ints(&[3, 4], &device);
            values(gradient(
                logits,
                targets,
                row.clone() * 4.0,
                row,
                &part,
                &Default::default(),
            ))
        };
        let shared = run(logits.clone());
        assert_eq!(
            values(logits.clone()),
            before,
            "a shared tensor was written to"
        );
        assert_eq!(run(logits), shared);
    }
}

#[test]
#[cfg(not(feature = "fusion"))]
fn unique_memory_is_reused_on_the_cpu() {
    use burn::backend::{DispatchTensorKind, flex::FlexTensor};
    fn address(tensor: &Tensor<2>) -> *const u8 {
        let flex: FlexTensor = match tensor.clone().into_dispatch().kind {
            DispatchTensorKind::Flex(tensor) => tensor.float(),
            other => panic!("{other:?} is not on the CPU"),
        };
        flex.bytes().as_ptr()
    }
    let device = Device::flex();
    let logits = tensor(&[0.0; 8], 4, (&device, DType::F32));
    let before = address(&logits);
    let row = Tensor::<1>::ones([2], &device);
    let part = VocabularyShard {
        first: 0,
        tokens: 4,
    };
    let targets = ints(&[0, 1], &device);
    let result = gradient(
        logits,
        targets,
        row.clone(),
        row,
        &part,
        &Default::default(),
    );
    assert_eq!(address(&result), before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_split_gives_the_same(
        rows in 1usize..6,
        tokens in 1usize..70,
        parts in 1usize..5,
        padding in 0usize..9,
        smoothing in prop_oneof![Just(0.0), 0.0..0.9],
        z_loss in prop_oneof![Just(0.0), 0.0..0.1],
        phase in 0.0..1.0,
    ) {
        let options = options(smoothing, z_loss, Some(0));
        let width = (tokens + padding).div_ceil(parts);
        let targets = spread(rows, tokens);
        let logits = Input::wave([rows, tokens], phase).scaled(3.0, 0.0).values;
        let cpu = Device::flex();
        let run = |parts, width, on| {
            split(&logits, tokens, width, parts, &targets, &options, on)
        };
        let whole = run(1, tokens, (&cpu, DType::F64));
        let cut = run(parts, width, (&cpu, DType::F64));
        assert_near("loss", &whole.0, &cut.0, 1e-13);
        assert_near("gradient", &whole.1, &cut.1, 1e-13);
        let (device, _) = devices().pop().expect("the CPU at least");
        let cut = run(parts, width, (&device, DType::F32));
        assert_near("loss", &whole.0, &cut.0, 1e-5);
        assert_near("gradient", &whole.1, &cut.1, 1e-5);
    }
}
