use burn::optim::{AdamWConfig, Optimizer as _};
use burn::tensor::{DType, Device, Tensor, TensorData, Tolerance};
use insta::assert_snapshot;
use proptest::prelude::*;

use super::*;
use crate::testing::{Input, devices};

mod cut;
mod outcome;
mod unused;

fn flat(length: usize, phase: f64, device: &Device, dtype: DType) -> Tensor<1> {
    let values = Input::wave([length], phase).values;
    Tensor::from_data(
        TensorData::new(values, [length]).convert_dtype(dtype),
        (device, dtype),
    )
}

fn buffers(length: usize, device: &Device, own: DType, moments: DType) -> AdamWBuffers {
    let second = Input::wave([length], 0.9).values;
    let second: Vec<f64> = second.iter().map(|x| 0.1 + x * x).collect();
    let second = TensorData::new(second, [length]).convert_dtype(moments);
    AdamWBuffers {
        master: flat(length, 0.1, device, own),
        first: flat(length, 0.4, device, moments),
        second: Tensor::from_data(second, (device, moments)),
    }
}

fn numbers(step: u64) -> AdamWStep {
    AdamWStep {
        rate: 0.03,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-6,
        weight_decay: 0.1,
        step,
        gradient_scale: 0.5,
    }
}

/// Returns the factors of `count` blocks. The factors repeat the values of `cycle`.
fn factors(count: usize, cycle: &[f32], device: &Device) -> Tensor<1> {
    let factors: Vec<f32> = cycle.iter().copied().cycle().take(count).collect();
    Tensor::from_data(TensorData::new(factors, [count]), (device, DType::F32))
}

/// Returns blocks with decay and rate factors for a buffer. `first` is the position of the buffer's first element in
/// its block.
fn blocks(first: usize, length: usize, device: &Device) -> Blocks {
    let count = (first + length).div_ceil(DECAY_BLOCK);
    Blocks {
        decay: factors(count, &[1.0, 0.0, 0.5], device),
        rate: Some(factors(count, &[0.0, 0.5, 1.0, 2.0], device)),
        first,
    }
}

fn decays(length: usize, device: &Device) -> [Decay; 5] {
    let cut = |first| blocks(first, length, device);
    [
        Decay::All,
        Decay::None,
        Decay::Blocks(Blocks::new(cut(0).decay)),
        Decay::Blocks(cut(0)),
        Decay::Blocks(cut(27)),
    ]
}

fn doubles(tensor: &Tensor<1>) -> Vec<f64> {
    let data = tensor.clone().into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

/// Asserts that the values differ by at most `tolerance`, relative to the largest expected value.
fn assert_near(what: &str, actual: &Tensor<1>, expected: &Tensor<1>, tolerance: f64) {
    let (actual, expected) = (doubles(actual), doubles(expected));
    assert_eq!(actual.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-30f64, |most, x| most.max(x.abs()));
    for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        assert!(
            (actual - expected).abs() <= tolerance * largest,
            "{what}: element {i} is {actual} and should be {expected}"
        );
    }
}

/// Compares twenty steps of the fused optimizer with Burn's optimizer.
fn against_burn(device: &Device, dtype: DType, betas: [f32; 2], tolerance: f64) {
    let length = 333;
    let burn = AdamWConfig::new()
        .with_beta_1(betas[0])
        .with_beta_2(betas[1])
        .with_epsilon(1.0 / 1024.0)
        .with_weight_decay(0.25)
        .build();
    let mut reference = flat(length, 0.2, &Device::flex(), dtype);
    let mut state = None;
    let zeros = || Tensor::<1>::zeros([length], (device, dtype));
    let mut ours = AdamWBuffers {
        master: flat(length, 0.2, device, dtype),
        first: zeros(),
        second: zeros(),
    };
    for t in 1..=20 {
        let rate = 0.02 / t as f64;
        let gradient = |device: &Device| flat(length, t as f64, device, dtype);
        let (next, after) = burn.step(rate, reference, gradient(&Device::flex()), state);
        (reference, state) = (next, after);
        let step = AdamWStep {
            rate,
            beta1: f64::from(betas[0]),
            beta2: f64::from(betas[1]),
            epsilon: 1.0 / 1024.0,
            weight_decay: 0.25,
            step: t,
            gradient_scale: 1.0,
        };
        (ours, _) = adamw(ours, gradient(device), &Decay::All, &step, None);
        let moments = state.as_ref().map(|state| &state.momentum);
        let moments = moments.expect("Burn's optimizer keeps a state");
        let what = format!("{dtype:?}, step {t}");
        assert_near(
            &format!("{what}: first"),
            &ours.first,
            &moments.moment_1,
            tolerance,
        );
        assert_near(
            &format!("{what}: second"),
            &ours.second,
            &moments.moment_2,
            tolerance,
        );
        assert_near(
            &format!("{what}: weights"),
            &ours.master,
            &reference,
            tolerance,
        );
    }
}

#[test]
fn twenty_steps_agree_with_burns_adamw() {
    for (device, _) in devices() {
        against_burn(&device, DType::F32, [0.9, 0.95], 2e-6);
    }
    // Burn computes the bias correction in f32. The corrections are exact only with these decay rates.
    against_burn(&Device::flex(), DType::F64, [0.5, 0.5], 1e-14);
    against_burn(&Device::flex(), DType::F64, [0.9, 0.999], 1e-4);
}

#[test]
fn every_type_decay_and_length_agrees_with_the_composition_in_f64() {
    for (device, has) in devices() {
        let all = [DType::F32, DType::F16, DType::BF16];
        let sixteen = all.into_iter().filter(|dtype| has.contains(dtype));
        for dtype in sixteen.chain(has.contains(&DType::F64).then_some(DType::F64)) {
            let own = wide(dtype);
            for moments in [own, DType::BF16] {
                if moments == DType::BF16 && (own == DType::F64 || !has.contains(&moments)) {
                    continue;
                }
                for length in [0, 1, 7, 64, 100, 4096, 40_000] {
                    types(&device, dtype, moments, length);
                }
            }
        }
    }
}

fn types(device: &Device, dtype: DType, moments: DType, length: usize) {
    let (own, flex) = (wide(dtype), Device::flex());
    let step = numbers(3);
    let pairs = decays(length, device)
        .into_iter()
        .zip(decays(length, &flex));
    for (decay, same) in pairs {
        let what = format!("{dtype:?}, moments {moments:?}, {length} elements on {device:?}");
        let before = buffers(length, device, own, moments);
        let rounded = buffers(length, &flex, own, moments);
        let (ours, copy) = adamw(
            before,
            flat(length, 0.7, device, dtype),
            &decay,
            &step,
            Some(Tensor::empty([length], (device, dtype))),
        );
        let double = |tensor: Tensor<1>| tensor.cast(DType::F64);
        let (expected, _) = composed::adamw(
            AdamWBuffers {
                master: double(rounded.master),
                first: double(rounded.first),
                second: double(rounded.second),
            },
            double(flat(length, 0.7, &flex, dtype)),
            &same,
            &step,
            None,
        );
        let tolerance = if own == DType::F64 { 1e-14 } else { 1e-6 };
        let kept = if moments == DType::BF16 {
            4e-3
        } else {
            tolerance
        };
        assert_near(&what, &ours.master, &expected.master, tolerance);
        assert_near(&what, &ours.first, &expected.first, kept);
        assert_near(&what, &ours.second, &expected.second, kept);
        let copy = copy.expect("a copy was asked for");
        assert_eq!(copy.dtype(), dtype);
        let narrowed = ours.master.cast(dtype).into_data();
        copy.into_data().assert_eq(&narrowed, true);
    }
}

#[test]
fn a_buffer_of_somebody_else_is_left_alone_and_an_own_one_is_written_to() {
    for (device, _) in devices() {
        let held = buffers(500, &device, DType::F32, DType::F32);
        let before = held.master.clone().into_data();
        let gradient = flat(500, 0.7, &device, DType::F32);
        let (after, copy) = adamw(held.clone(), gradient, &Decay::All, &numbers(1), None);
        assert!(copy.is_none());
        held.master.into_data().assert_eq(&before, true);
        let change = doubles(&(after.master - Tensor::from_data(before, (&device, DType::F32))));
        assert!(change.iter().all(|x| *x != 0.0));
    }
    let place = |tensor: Tensor<1>| {
        let flex = tensor.try_into_primitive::<burn::backend::Flex>();
        flex.expect("the tensor is on Flex").bytes().as_ptr() as usize
    };
    let own = buffers(500, &Device::flex(), DType::F32, DType::BF16);
    let model = Tensor::ones([500], (&Device::flex(), DType::F16));
    let places = [&own.master, &own.first, &own.second, &model];
    let places = places.map(|tensor| place(tensor.clone()));
    let gradient = || flat(500, 0.7, &Device::flex(), DType::F32);
    let (after, copy) = adamw(own, gradient(), &Decay::All, &numbers(1), Some(model));
    let copy = copy.expect("a copy was given");
    let held = copy.clone();
    let before = held.clone().into_data();
    let all = [
        after.master.clone(),
        after.first.clone(),
        after.second.clone(),
        copy.clone(),
    ];
    assert_eq!(all.map(place), places);
    let (_, other) = adamw(after, gradient(), &Decay::All, &numbers(2), Some(copy));
    held.into_data().assert_eq(&before, true);
    assert_ne!(other.map(place), Some(places[3]));
}

#[test]
fn a_gradient_that_is_not_finite_reaches_its_own_weight_only() {
    for (device, _) in devices() {
        let mut gradient = Input::wave([300], 0.3).values;
        gradient[17] = f64::NAN;
        gradient[18] = f64::INFINITY;
        let data = TensorData::new(gradient, [300]).convert_dtype(DType::F32);
        let gradient = Tensor::from_data(data, (&device, DType::F32));
        let own = buffers(300, &device, DType::F32, DType::F32);
        let (after, _) = adamw(own, gradient, &Decay::All, &numbers(1), None);
        let bad: Vec<_> = doubles(&after.master)
            .iter()
            .enumerate()
            .filter_map(|(i, x)| (!x.is_finite()).then_some(i))
            .collect();
        assert_eq!(bad, [17, 18]);
    }
}

fn in_pool<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("a pool can be built").install(work)
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let run = || {
        let device = Device::flex();
        let own = buffers(100_001, &device, DType::F32, DType::F32);
        let gradient = flat(100_001, 0.7, &device, DType::F32);
        let norm = sum_of_squares(gradient.clone());
        let (after, _) = adamw(own, gradient, &Decay::All, &numbers(2), None);
        (after.master.into_data(), norm.into_data())
    };
    let (master, norm) = in_pool(1, run);
    for threads in [2, 5] {
        let (other, sum) = in_pool(threads, run);
        other.assert_eq(&master, true);
        sum.assert_eq(&norm, true);
    }
}

#[test]
fn sums_of_squares_agree_in_every_type() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for length in [0, 1, 7, 64, 1000, 16_384, 16_385, 70_000] {
                let x = flat(length, 0.2, &device, dtype);
                let expected: f64 = doubles(&x).iter().map(|x| x * x).sum();
                let sum = sum_of_squares(x.clone());
                assert_eq!((sum.dtype(), sum.dims()), (wide(dtype), [1]));
                let composed = composed::sum_of_squares(x);
                // The tolerance is larger for Burn's sum, because on a GPU one unit adds many elements one by one.
                for (sum, whose, near) in [(sum, "ours", 1e-6), (composed, "composed", 1e-5)] {
                    let sum = doubles(&sum)[0];
                    let error = (sum - expected).abs();
                    assert!(
                        error <= near * expected,
                        "{dtype:?} {length}, {whose}: {sum}, {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn many_ones_are_counted_and_large_values_do_not_overflow() {
    for (device, dtypes) in devices() {
        // A f32 sum of ones that are added one by one stops at 2^24, which is below this count.
        let count = 20_000_000;
        let dtype = DType::F32;
        let sum = sum_of_squares(Tensor::ones([count], (&device, dtype)));
        assert_eq!(doubles(&sum), [count as f64]);
        if dtypes.contains(&DType::F16) {
            let sum = sum_of_squares(Tensor::full([4096], 60_000.0, (&device, DType::F16)));
            let expected = 4096.0 * 60_000.0f64.powi(2);
            assert!((doubles(&sum)[0] / expected - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn several_buffers_make_one_sum_whatever_the_form_of_the_reduction() {
    let sum = |device: &Device| {
        let parts = [3, 0, 40_000, 1, 8192].map(|length| flat(length, 0.6, device, DType::F32));
        let expected: f64 = parts.iter().flat_map(doubles).map(|x| x * x).sum();
        let sum = sum_of_squares_of(&parts);
        let composed = composed::sum_of_squares_of(&parts);
        let sums = [doubles(&sum)[0], doubles(&composed)[0]];
        for sum in sums {
            assert!((sum / expected - 1.0).abs() < 1e-6, "{sum}, {expected}");
        }
        sums[0]
    };
    for (device, _) in devices() {
        assert_eq!(sum(&device), sum(&device));
    }
    #[cfg(feature = "wgpu")]
    for reduction in [
        crate::cube::Reduction::Planes,
        crate::cube::Reduction::Shared,
    ] {
        crate::cube::with_reduction(reduction, || sum(&Device::wgpu(Default::default())));
    }
    let mixed = [DType::F16, DType::F64].map(|dtype| flat(9, 0.6, &Device::flex(), dtype));
    assert_eq!(sum_of_squares_of(&mixed).dtype(), DType::F64);
}

fn message(work: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(work).expect_err("the call must fail");
    let text = panic.downcast_ref::<String>().cloned();
    text.expect("the panic has a message")
}

#[test]
fn what_does_not_fit_is_named_on_every_device() {
    insta::allow_duplicates!(for (device, _) in devices() {
        let call = |own: AdamWBuffers, gradient: Tensor<1>, decay: Decay, step: AdamWStep| {
            message(std::panic::AssertUnwindSafe(move || {
                adamw(own, gradient, &decay, &step, None);
            }))
        };
        let own = || buffers(100, &device, DType::F32, DType::F32);
        let gradient = |length| flat(length, 0.1, &device, DType::F32);
        assert_snapshot!(
            call(own(), gradient(99), Decay::All, numbers(1)),
            @"adamw: the weights have 100 elements, the first moment 100, the second 100, the \
              gradient 99: expected equal lengths"
        );
        let decay = Decay::Blocks(Blocks::new(gradient(3)));
        assert_snapshot!(
            call(own(), gradient(100), decay, numbers(1)),
            @"adamw: 3 decay factors for 100 elements in blocks of 64, from element 0 of the first block: expected 2"
        );
        let decay = Decay::Blocks(Blocks {
            rate: Some(gradient(2)),
            first: 30,
            ..Blocks::new(gradient(3))
        });
        assert_snapshot!(
            call(own(), gradient(100), decay, numbers(1)),
            @"adamw: 2 rate factors for 100 elements in blocks of 64, from element 30 of the first block: expected 3"
        );
        let decay = Decay::Blocks(Blocks {
            first: 64,
            ..Blocks::new(gradient(3))
        });
        assert_snapshot!(
            call(own(), gradient(100), decay, numbers(1)),
            @"adamw: invalid offset of the first element in its block = 64: expected a number below 64"
        );
        let decay = Decay::Blocks(Blocks {
            rate: Some(gradient(2).cast(DType::F16)),
            ..Blocks::new(gradient(2))
        });
        assert_snapshot!(
            call(own(), gradient(100), decay, numbers(1)),
            @"adamw: invalid type of the rate's factors = F16: expected F32"
        );
        assert_snapshot!(
            call(own(), gradient(100), Decay::All, numbers(0)),
            @"adamw: invalid step = 0: expected 1 for the first step"
        );
        let step = AdamWStep {
            beta2: 1.0,
            ..numbers(1)
        };
        assert_snapshot!(
            call(own(), gradient(100), Decay::All, step),
            @"adamw: invalid beta2 = 1: expected a number from 0 up to but not including 1"
        );
        let half = AdamWBuffers {
            second: own().second.cast(DType::F16),
            ..own()
        };
        assert_snapshot!(
            call(half, gradient(100), Decay::All, numbers(1)),
            @"adamw: invalid type of the second moment = F16 with weights in F32: expected the type of the first moment"
        );
    });
    assert_snapshot!(
        message(|| drop(sum_of_squares_of(&[]))),
        @"sum_of_squares_of: invalid number of buffers = 0: expected 1 or more"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn any_length_step_and_scale_agrees(
        length in 0usize..2000,
        first in 0usize..64,
        step in 1u64..1_000_000_000,
        scale in 1e-4f64..1e4,
        rate in -1.0f64..1.0,
    ) {
        let device = Device::flex();
        let step = AdamWStep { step, gradient_scale: scale, rate, ..numbers(1) };
        let own = || buffers(length, &device, DType::F64, DType::F64);
        let gradient = || flat(length, 0.7, &device, DType::F64);
        let decay = Decay::Blocks(blocks(first, length, &device));
        let (ours, _) = adamw(own(), gradient(), &decay, &step, None);
        let (expected, _) = composed::adamw(own(), gradient(), &decay, &step, None);
        let tolerance = Tolerance::<f64>::absolute(1e-12).set_relative(1e-12);
        ours.master.into_data().assert_approx_eq::<f64>(&expected.master.into_data(), tolerance);
    }
}
