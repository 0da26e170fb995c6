use burn::tensor::{DType, Device, Tensor, TensorData};

use super::*;
use crate::fp8::quantize::tests::message;
use crate::fp8::{Format, QuantizerUsage, Scaling, quantize, quantize_logged};
use crate::testing::devices;

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;
const NUMERATOR: f32 = 448.0;

fn tensor(values: &[f32], device: &Device) -> Tensor<1> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    Tensor::from_data(data, (device, DType::F32))
}

fn floats(x: &Tensor<1>) -> Vec<f32> {
    x.to_data().try_into_vec().expect("f32")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn largest(history: usize) -> ScaleRule {
    ScaleRule {
        history,
        numerator: NUMERATOR,
        most_recent: false,
    }
}

fn most_recent(history: usize) -> ScaleRule {
    ScaleRule {
        most_recent: true,
        ..largest(history)
    }
}

/// Checks the scale after each step. `script` has the largest magnitude of each step and the expected scale.
#[track_caller]
fn assert_follows(rule: ScaleRule, script: &[(f32, f32)]) {
    for (device, _) in devices() {
        let rules = ScaleRules::new([Some(rule)], &device);
        let mut start = vec![0.0; rules.state_len()];
        start[0] = 1.0;
        let (mut state, mut log) = (tensor(&start, &device), empty_log(1, &device));
        let mut expected = vec![0.0; rule.history];
        for (step, (amax, scale)) in script.iter().enumerate() {
            log = log_magnitude(log, 0, tensor(&[*amax], &device), 0);
            let next = next_scales(log, state, &rules);
            (state, log) = (next.state, next.log);
            let found = floats(&state);
            assert_eq!(
                found[0], *scale,
                "after step {step}, of {amax}, on {device:?}"
            );
            expected.insert(0, *amax);
            expected.truncate(rule.history);
            assert_eq!(
                bits(&found[1..]),
                bits(&expected),
                "step {step} on {device:?}"
            );
        }
    }
}

#[test]
fn the_most_recent_magnitude_counts_alone() {
    let script = [
        (0.0, 1.0),
        (4.0, 112.0),
        (448.0, 1.0),
        (7.0, 64.0),
        (0.0, 64.0),
        (INF, 64.0),
        (NAN, 64.0),
        (14.0, 32.0),
        // 448 / 1e-40 overflows f32.
        (1e-40, f32::MAX),
        (3.0, 448.0 / 3.0),
    ];
    for length in [1, 2, 1024] {
        assert_follows(most_recent(length), &script);
    }
}

#[test]
fn the_largest_magnitude_counts_until_it_is_forgotten() {
    let script = [
        (2.0, 224.0),
        (7.0, 64.0),
        (3.5, 64.0),
        (1.75, 64.0),
        (1.75, 128.0),
        (0.0, 256.0),
        (0.0, 256.0),
        // The history has only zeros, so the scale does not change.
        (0.0, 256.0),
        (56.0, 8.0),
    ];
    assert_follows(largest(3), &script);
}

#[test]
fn what_is_not_finite_holds_the_scale_of_its_step_alone() {
    for bad in [INF, NAN] {
        let script = [
            (7.0, 64.0),
            (bad, 64.0),
            (14.0, 32.0),
            (3.5, 32.0),
            (3.5, 32.0),
            (3.5, 128.0),
        ];
        assert_follows(largest(3), &script);
    }
    let script = [
        (INF, 1.0),
        (NAN, 1.0),
        (7.0, 64.0),
        (0.0, 64.0),
        (0.0, 64.0),
    ];
    assert_follows(largest(2), &script);
}

#[test]
fn a_length_of_one_is_the_most_recent() {
    let script = [(7.0, 64.0), (NAN, 64.0), (3.5, 128.0), (0.0, 128.0)];
    assert_follows(largest(1), &script);
}

#[test]
fn a_small_numerator_over_a_subnormal_magnitude_is_no_infinity() {
    let numerator = NUMERATOR * 2f32.powi(-64);
    let rule = ScaleRule {
        numerator,
        ..most_recent(1)
    };
    let amaxes = [1e-40, f32::from_bits(1), f32::from_bits(0x007f_ffff), 1e-37];
    let script = amaxes.map(|amax| (amax, numerator / amax));
    assert!(script.iter().all(|(_, scale)| scale.is_finite()));
    assert_follows(rule, &script);
}

/// The history is longer than the number of units in a cube. The step drops the oldest magnitude, which is the largest
/// one.
#[test]
fn a_long_history_moves_by_one() {
    for (device, _) in devices() {
        let rules = ScaleRules::new([Some(largest(600))], &device);
        let history: Vec<f32> = (1..=600).map(|at| at as f32).collect();
        let state = tensor(&[&[1.0], &history[..]].concat(), &device);
        let log = log_magnitude(empty_log(1, &device), 0, tensor(&[5.0], &device), 0);
        let found = floats(&next_scales(log, state, &rules).state);
        let expected = [&[448.0 / 599.0, 5.0], &history[..599]].concat();
        assert_eq!(found, expected, "{device:?}");
    }
}

/// Three slots have different rules, and one of them has no rule. One of the three ranks has received no tensor.
#[test]
fn a_slot_has_the_magnitudes_of_all_ranks() {
    for (device, _) in devices() {
        let rules = ScaleRules::new([Some(largest(2)), None, Some(most_recent(1))], &device);
        assert_eq!((rules.history(0), rules.history(2)), (3..5, 5..6));
        let state = [1.0, 2.0, 3.0, 14.0, 7.0, 5.0];
        let absent = [-1.0, 0.0, 0.0];
        let step = |logs: &[[f32; 3]]| {
            let next = next_scales(
                tensor(&logs.concat(), &device),
                tensor(&state, &device),
                &rules,
            );
            assert_eq!(floats(&next.log), absent.repeat(3));
            [floats(&next.state), floats(&next.counts)]
        };
        let logs = [
            [[3.5, 1.0, 8.0], [1.0, 1.0, 4.0], absent],
            [absent, [9.0, 2.0, 4.0], absent],
            [[7.0, 2.0, 8.0], absent, absent],
        ];
        let [next, counts] = step(&logs.concat());
        assert_eq!(next, [32.0, 2.0, 3.0, 7.0, 14.0, 5.0], "{device:?}");
        assert_eq!(counts, [3.0, 16.0, 3.0, 8.0, 0.0, 0.0], "{device:?}");
        // NaN on any rank counts as the largest magnitude.
        let [next, _] = step(&[
            [INF, 0.0, 1.0],
            absent,
            [NAN, 0.0, 1.0],
            absent,
            absent,
            [7.0, 0.0, 1.0],
        ]);
        assert_eq!(next[..3], [1.0, 2.0, 3.0], "{device:?}");
        assert!(next[3] == INF && next[5].is_nan(), "{device:?}");
    }
}

/// Tests that [`quantize_logged`] agrees with [`quantize`] in its copies and its log. The scale is an element of a
/// tensor of scales.
#[test]
fn a_logged_quantiser_is_the_other_one() {
    for (device, _) in devices() {
        let x = |factor: f32| {
            let values = [1000.0, -2.0, 0.1, 3.0, 0.0, 500.0].map(|value| value * factor);
            tensor(&values, &device).reshape([2, 3])
        };
        let scales = tensor(&[1.0, 0.5, 2.0], &device);
        let scaling = |index| Scaling::Element {
            scales: scales.clone(),
            index,
        };
        let mut log = empty_log(3, &device);
        let mut expected = [[-1.0, 0.0, 0.0]; 3];
        for (slot, index, factor) in [(1, 2, 1.0), (1, 1, 0.5), (2, 0, NAN), (2, 0, 1.0)] {
            let [x, both] = [x(factor), x(factor)];
            let given = Scaling::Tensor(scales.clone().narrow(0, index, 1));
            let alone = quantize(both, Format::E4M3, &given, QuantizerUsage::BOTH);
            let usage = QuantizerUsage::BOTH;
            let logged = quantize_logged(x, Format::E4M3, &scaling(index), usage, log, slot);
            let parts = |copy: Option<crate::fp8::Fp8Matrix>| {
                crate::fp8::quantize::tests::parts(&copy.unwrap())
            };
            assert_eq!(parts(logged.rowwise), parts(alone.rowwise));
            assert_eq!(parts(logged.columnwise), parts(alone.columnwise));
            log = logged.seen;
            let [amax, beyond] = floats(&alone.seen)[..] else {
                panic!("two numbers are seen")
            };
            let entry = &mut expected[slot];
            let keeps = entry[0] > amax || entry[0].is_nan();
            if !keeps {
                entry[0] = amax;
            }
            entry[1] += beyond;
            entry[2] += 6.0;
        }
        let found = floats(&log);
        assert_eq!(found[..6], expected.concat()[..6], "{device:?}");
        assert!(found[6].is_nan() && expected[2][0].is_nan(), "{device:?}");
        assert_eq!(found[7..], expected[2][1..], "{device:?}");
        assert_eq!(expected[1][1], 2.0, "some values are beyond the format");

        // A scaling without a given scale, and statistics that were computed earlier.
        let blocks = quantize(x(3.0), Format::E4M3, &Scaling::Mx, QuantizerUsage::ROWWISE);
        let by_hand = log_magnitude(empty_log(1, &device), 0, blocks.seen, 6);
        let log = empty_log(1, &device);
        let usage = QuantizerUsage::ROWWISE;
        let logged = quantize_logged(x(3.0), Format::E4M3, &Scaling::Mx, usage, log, 0);
        assert_eq!(floats(&logged.seen), [3000.0, 0.0, 6.0], "{device:?}");
        assert_eq!(floats(&by_hand), floats(&logged.seen), "{device:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::flex();
    let rules = ScaleRules::new([Some(largest(2))], &device);
    let log = || empty_log(1, &device);
    let step = |logs: Tensor<1>, state: &[f32]| {
        let state = tensor(state, &device);
        message(|| drop(next_scales(logs.clone(), state.clone(), &rules)))
    };
    let refused = step(log().narrow(0, 0, 2), &[1.0; 3]);
    assert!(
        refused.contains("logs of 2 numbers for 1 slots: expected a multiple of 3"),
        "{refused}"
    );
    let refused = step(log(), &[1.0; 2]);
    assert!(
        refused.contains("a state of 2 numbers: expected 3"),
        "{refused}"
    );
    let x = Tensor::<2>::ones([2, 2], &device);
    let both = QuantizerUsage::BOTH;
    let refused = message(|| {
        drop(quantize_logged(
            x.clone(),
            Format::E4M3,
            &Scaling::Mx,
            both,
            log(),
            1,
        ));
    });
    assert!(
        refused.contains("entry 1 of a log of 3 numbers: expected at least 6"),
        "{refused}"
    );
    let refused = message(|| {
        let scales = Tensor::ones([2], &device);
        drop(quantize(
            x.clone(),
            Format::E4M3,
            &Scaling::Element { scales, index: 2 },
            both,
        ));
    });
    assert!(
        refused.contains("scale 2 of 2: expected an index below 2"),
        "{refused}"
    );
    let refused = message(|| drop(log_magnitude(log(), 0, tensor(&[1.0; 3], &device), 1)));
    assert!(
        refused.contains("a magnitude of 3 numbers: expected 1 or 2"),
        "{refused}"
    );
}
