use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use insta::assert_snapshot;
use proptest::prelude::*;

use super::*;
use crate::testing::{Input, assert_gradients, compare, compare_within, devices, evaluate};

/// A mask, which is created on the device of the test.
#[derive(Clone, Copy, Debug)]
enum MaskKind {
    None,
    Causal,
    Window(usize, usize),
    Lengths,
    /// Whether the mask tensor has the batch and the head dimension of the scores. Otherwise it has size 1 there.
    Hidden(bool, bool),
}

const KINDS: [MaskKind; 9] = [
    MaskKind::None,
    MaskKind::Causal,
    MaskKind::Window(3, 0),
    MaskKind::Window(2, 5),
    MaskKind::Window(0, 0),
    MaskKind::Lengths,
    MaskKind::Hidden(true, true),
    MaskKind::Hidden(false, true),
    MaskKind::Hidden(true, false),
];

/// Returns the lengths of the batches, from 0 to all keys.
fn length(batch: usize, batches: usize, keys: usize) -> usize {
    batch * keys / (batches - 1).max(1)
}

/// Hides about a third of the keys, and all keys of the first row.
fn hides(i: usize, keys: usize) -> bool {
    i < keys || (i * 7 + i / 3).is_multiple_of(3)
}

fn mask(kind: MaskKind, shape: [usize; 4], device: &Device) -> Mask {
    let [batch, heads, queries, keys] = shape;
    match kind {
        MaskKind::None => Mask::None,
        MaskKind::Causal => Mask::Causal,
        MaskKind::Window(left, right) => Mask::Window { left, right },
        MaskKind::Lengths => {
            let lengths: Vec<i32> = (0..batch).map(|i| length(i, batch, keys) as i32).collect();
            Mask::Lengths(Tensor::<1, Int>::from_data(
                TensorData::new(lengths, [batch]),
                device,
            ))
        }
        MaskKind::Hidden(batches, all_heads) => {
            let shape = [
                if batches { batch } else { 1 },
                if all_heads { heads } else { 1 },
                queries,
                keys,
            ];
            let truth: Vec<bool> = (0..shape.iter().product())
                .map(|i| hides(i, keys))
                .collect();
            Mask::Hidden(Tensor::<4, Bool>::from_data(
                TensorData::new(truth, shape),
                device,
            ))
        }
    }
}

fn sink(kind: u8, leaves: &[Tensor<1>]) -> Sink {
    match kind {
        0 => Sink::None,
        1 => Sink::OffByOne,
        _ => Sink::PerHead(leaves[1].clone()),
    }
}

type Softmax = fn(Tensor<4>, f64, &Mask, Sink) -> Tensor<4>;

fn flat(
    softmax: Softmax,
    shape: [usize; 4],
    scale: f64,
    kind: MaskKind,
    sunk: u8,
) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
    move |leaves| {
        let scores = leaves[0].clone().reshape(shape);
        let mask = mask(kind, shape, &scores.device());
        softmax(scores, scale, &mask, sink(sunk, leaves)).flatten(0, 3)
    }
}

fn inputs(shape: [usize; 4]) -> Vec<Input> {
    vec![
        Input::wave(shape, 0.1).scaled(2.0, 0.0),
        // The logit is close to the log-sum-exp of the keys, so that the probability of the sink is significant.
        Input::wave([shape[1]], 0.6).scaled(1.0, (shape[3] as f64).ln()),
    ]
}

fn check_case(shape: [usize; 4], scale: f64, kind: MaskKind, sunk: u8) {
    // The gradient of the sink sums rounded probabilities, whose terms partly cancel.
    compare_within(
        if sunk == 2 { 4.0 } else { 1.0 },
        &format!("{kind:?} with sink {sunk} of {shape:?}"),
        &inputs(shape),
        flat(masked_softmax, shape, scale, kind, sunk),
        flat(composed::masked_softmax, shape, scale, kind, sunk),
    );
}

#[test]
fn every_mask_with_every_sink_is_the_composed_one() {
    for kind in KINDS {
        check_case([2, 3, 5, 7], 0.7, kind, 2);
    }
    for kind in [
        MaskKind::None,
        MaskKind::Lengths,
        MaskKind::Hidden(true, true),
    ] {
        check_case([3, 2, 4, 16], -0.4, kind, 0);
        check_case([3, 2, 4, 16], -0.4, kind, 1);
    }
}

#[test]
fn more_queries_than_keys_leave_the_first_rows_empty() {
    for kind in [MaskKind::Causal, MaskKind::Window(1, 1)] {
        check_case([1, 2, 9, 4], 1.0, kind, 0);
        check_case([1, 2, 9, 4], 1.0, kind, 2);
        let scores = Tensor::<4>::ones([1, 1, 5, 2], &Device::flex());
        let p = masked_softmax(
            scores,
            1.0,
            &mask(kind, [1, 1, 5, 2], &Device::flex()),
            Sink::None,
        );
        let empty = p.narrow(2, 0, 2).sum().into_scalar::<f32>();
        assert_eq!(empty, 0.0);
    }
}

#[test]
fn any_number_of_keys_fits() {
    for keys in [1, 7, 33, 1000, 4097] {
        check_case([1, 1, 2, keys], 1.0, MaskKind::None, 0);
        check_case([1, 2, 3, keys], 1.0, MaskKind::Causal, 0);
    }
    check_case([2, 1, 1, 4096], 1.0, MaskKind::Hidden(true, false), 0);
    check_case([2, 1, 1, 2052], 1.0, MaskKind::Lengths, 1);
}

/// The rows do not fit in the registers of a cube and are read twice.
#[test]
fn long_rows_are_the_composed_ones() {
    check_case([1, 1, 1, 40_000], 1.0, MaskKind::None, 0);
    check_case([1, 1, 2, 33_001], 1.0, MaskKind::Window(30_000, 5), 1);
}

#[test]
fn strided_and_sliced_scores_are_taken() {
    let shape = [2, 3, 6, 8];
    let with = |softmax: Softmax| {
        move |leaves: &[Tensor<1>]| {
            let scores = leaves[0].clone().reshape(shape);
            let scores = scores.swap_dims(2, 3).narrow(1, 1, 2).narrow(3, 1, 5);
            let sink = Sink::PerHead(leaves[1].clone().narrow(0, 1, 2));
            let p = softmax(scores, 0.5, &Mask::Causal, sink);
            (p.swap_dims(1, 2) * 2.0).flatten(0, 3)
        }
    };
    let (ours, reference) = (with(masked_softmax), with(composed::masked_softmax));
    compare("strided", &inputs(shape), ours, reference);
}

#[test]
fn a_sliced_or_expanded_mask_is_taken() {
    let shape = [2, 2, 3, 8];
    let with = |softmax: Softmax| {
        move |leaves: &[Tensor<1>]| {
            let scores = leaves[0].clone().reshape(shape);
            let kind = MaskKind::Hidden(true, false);
            let Mask::Hidden(hidden) = mask(kind, [3, 1, 3, 10], &scores.device()) else {
                panic!("{kind:?} hides");
            };
            let hidden = hidden.slice([1..3, 0..1, 0..3, 1..9]).expand(shape);
            softmax(scores, 0.5, &Mask::Hidden(hidden), Sink::None).flatten(0, 3)
        }
    };
    let (ours, reference) = (with(masked_softmax), with(composed::masked_softmax));
    compare("sliced mask", &inputs(shape), ours, reference);
}

#[test]
fn gradients_are_those_of_differences() {
    let shape = [2, 2, 3, 5];
    for kind in [
        MaskKind::None,
        MaskKind::Causal,
        MaskKind::Lengths,
        MaskKind::Hidden(true, true),
    ] {
        for sunk in 0..3 {
            let operation = flat(masked_softmax, shape, 0.6, kind, sunk);
            assert_gradients(&format!("{kind:?}, sink {sunk}"), &inputs(shape), operation);
        }
    }
}

#[test]
fn the_score_of_a_masked_key_does_not_matter() {
    let shape = [2, 2, 6, 12];
    for bad in [f64::NAN, f64::NEG_INFINITY, f64::INFINITY] {
        for kind in [
            MaskKind::Window(2, 1),
            MaskKind::Lengths,
            MaskKind::Hidden(true, true),
        ] {
            let mut inputs = inputs(shape);
            let [_, heads, queries, keys] = shape;
            for (i, value) in inputs[0].values.iter_mut().enumerate() {
                let (row, key) = (i / keys, i % keys);
                let (query, batch) = (row % queries, row / (queries * heads));
                let shift = keys - queries;
                let hidden = match kind {
                    MaskKind::Window(left, right) => {
                        key + left < query + shift || key > query + shift + right
                    }
                    MaskKind::Lengths => key >= length(batch, shape[0], keys),
                    _ => hides(i, keys),
                };
                if hidden {
                    *value = bad;
                }
            }
            let (ours, reference) = (
                flat(masked_softmax, shape, 0.5, kind, 2),
                flat(composed::masked_softmax, shape, 0.5, kind, 2),
            );
            let clean = evaluate(
                &inputs,
                &Device::flex(),
                burn::tensor::DType::F64,
                burn::tensor::DType::F64,
                &ours,
            );
            let values = clean.output.iter().chain(clean.gradients.iter().flatten());
            assert!(values.clone().all(|x| x.is_finite()), "{kind:?} {bad}");
            compare(&format!("{kind:?} over {bad}"), &inputs, ours, reference);
        }
    }
}

#[test]
fn large_scores_and_rows_of_minus_infinity_are_taken() {
    let shape = [1, 1, 4, 6];
    let mut inputs = inputs(shape);
    for (i, value) in inputs[0].values.iter_mut().enumerate() {
        *value = match i / 6 {
            0 => 30_000.0 - 10_000.0 * (i % 6) as f64,
            1 => -30_000.0 + 0.5 * i as f64,
            2 => f64::NEG_INFINITY,
            _ if i % 2 == 0 => f64::NEG_INFINITY,
            _ => *value,
        };
    }
    for sunk in 0..3 {
        compare(
            "extremes",
            &inputs,
            flat(masked_softmax, shape, 1.0, MaskKind::None, sunk),
            flat(composed::masked_softmax, shape, 1.0, MaskKind::None, sunk),
        );
    }
}

#[test]
fn a_visible_nan_affects_its_own_row_only() {
    let scores =
        Tensor::<4>::from_data([[[[f32::NAN, 0.0, 0.0], [0.0, 0.0, 0.0]]]], &Device::flex());
    let p = masked_softmax(scores, 1.0, &Mask::Causal, Sink::None);
    let p: Vec<f32> = p.into_data().try_into_vec().unwrap();
    assert!(p[0].is_nan() && p[1].is_nan());
    assert_eq!(p[2], 0.0);
    assert!(p[3..].iter().all(|p| (p - 1.0 / 3.0).abs() < 1e-6));
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let shape = [3, 4, 70, 130];
    let operation = flat(masked_softmax, shape, 0.3, MaskKind::Causal, 2);
    let dtype = burn::tensor::DType::F32;
    let run = || evaluate(&inputs(shape), &Device::flex(), dtype, dtype, &operation);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    let (one, many) = (pool.install(run), run());
    assert_eq!(one.output, many.output);
    assert_eq!(one.gradients, many.gradients);
}

#[test]
fn nothing_gives_nothing() {
    for (device, _) in devices() {
        for shape in [[0, 2, 3, 4], [2, 0, 3, 4], [2, 2, 0, 4], [2, 2, 3, 0]] {
            let scores = Tensor::<4>::zeros(shape, &device);
            let p = masked_softmax(scores, 1.0, &Mask::Causal, Sink::OffByOne);
            assert_eq!(p.dims(), shape);
        }
    }
}

#[test]
fn sixteen_bit_scores_take_a_sink_in_f32() {
    let device = Device::flex().autodiff();
    let logits = Tensor::<1>::from_floats([0.0, 1.0], &device).require_grad();
    let scores = Tensor::<4>::zeros([1, 2, 1, 2], &device).cast(burn::tensor::DType::BF16);
    let p = masked_softmax(scores, 1.0, &Mask::None, Sink::PerHead(logits.clone()));
    assert_eq!(p.dtype(), burn::tensor::DType::BF16);
    let gradients = p.cast(burn::tensor::DType::F32).sum().backward();
    // The derivative of 2 / (2 + e^s) is -2 e^s / (2 + e^s)^2.
    let gradient: Vec<f32> = logits
        .grad(&gradients)
        .unwrap()
        .into_data()
        .try_into_vec()
        .unwrap();
    for (logit, gradient) in [0.0f32, 1.0].into_iter().zip(gradient) {
        let expected = -2.0 * logit.exp() / (2.0 + logit.exp()).powi(2);
        assert!(
            (gradient - expected).abs() < 2e-3,
            "{gradient} and {expected}"
        );
    }
}

/// Returns the panic message of `work`.
fn message(work: impl FnOnce() -> Tensor<4> + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(work).expect_err("the call must fail");
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(_) => panic!("a panic without a message"),
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for softmax in [masked_softmax as Softmax, composed::masked_softmax] {
        insta::allow_duplicates!(for (device, _) in devices() {
            let refusal = |scale: f64, mask: fn(&Device) -> Mask, sink: fn(&Device) -> Sink| {
                let device = device.clone();
                message(std::panic::AssertUnwindSafe(move || {
                    let scores = Tensor::<4>::zeros([2, 3, 4, 5], &device);
                    softmax(scores, scale, &mask(&device), sink(&device))
                }))
            };
            assert_snapshot!(
                refusal(f64::NAN, |_| Mask::None, |_| Sink::None),
                @"masked_softmax: invalid scale = NaN: expected a finite number"
            );
            let lengths = |device: &Device| Mask::Lengths(Tensor::zeros([3], device));
            assert_snapshot!(
                refusal(1.0, lengths, |_| Sink::None),
                @"masked_softmax: lengths [3] do not fit scores [2, 3, 4, 5]: expected [2]"
            );
            let hidden = |device: &Device| {
                Mask::Hidden(Tensor::<4, Int>::zeros([2, 2, 4, 5], device).bool())
            };
            assert_snapshot!(
                refusal(1.0, hidden, |_| Sink::None),
                @"masked_softmax: a mask [2, 2, 4, 5] does not fit scores [2, 3, 4, 5]: expected \
                  [2 or 1, 3 or 1, 4, 5]"
            );
            assert_snapshot!(
                refusal(
                    1.0,
                    |_| Mask::None,
                    |device| Sink::PerHead(Tensor::zeros([2], device))
                ),
                @"masked_softmax: sinks [2] do not fit scores [2, 3, 4, 5]: expected [3]"
            );
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_shape_is_the_composed_one(
        (batch, heads, queries, keys) in (1..4usize, 1..4usize, 1..10usize, 1..40usize),
        scale in -2.0..2.0f64,
        kind in prop::sample::select(KINDS.to_vec()),
        sunk in 0..3u8,
    ) {
        let shape = [batch, heads, queries, keys];
        let dtype = burn::tensor::DType::F64;
        let run = |softmax: Softmax| {
            let operation = flat(softmax, shape, scale, kind, sunk);
            let evaluation = evaluate(&inputs(shape), &Device::flex(), dtype, dtype, &operation);
            let gradients = evaluation.gradients.into_iter().flatten();
            evaluation.output.into_iter().chain(gradients).collect::<Vec<_>>()
        };
        let (ours, reference) = (run(masked_softmax), run(composed::masked_softmax));
        for (ours, reference) in ours.iter().zip(&reference) {
            prop_assert!((ours - reference).abs() < 1e-11, "{ours} and {reference}");
        }
    }
}
