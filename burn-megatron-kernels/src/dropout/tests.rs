use burn::tensor::{DType, Device, Tensor};
use insta::assert_snapshot;
use proptest::prelude::*;

use super::*;
use crate::testing::{Input, assert_gradients, compare, devices, evaluate};

type Operation<const D: usize> =
    fn(Tensor<D>, Option<Tensor<1>>, Option<Tensor<D>>, Option<Draw>) -> Tensor<D>;

fn draw(first: u64, run: usize, pitch: u64) -> Option<Draw> {
    Some(Draw {
        probability: 0.3,
        key: 0x0123_4567_89ab_cdef,
        position: 0x1_0000_0005,
        first,
        run,
        pitch,
    })
}

/// Returns draws with aligned and odd offsets, below and across the index 2^32. Some products exceed 32 bits.
fn draws(elements: usize) -> Vec<Option<Draw>> {
    let all = elements as u64;
    vec![
        draw(0, elements, all),
        draw(1 << 40, 8, 24),
        draw(3, 7, 19),
        draw((1 << 32) - 5, elements, 0),
        draw((1 << 34) - 10, 5, (1 << 33) + 3),
        draw(u64::MAX - 2 * all - (1 << 50), 1, 2),
    ]
}

fn masks_of(device: &Device, shape: [usize; 2], draw: Option<Draw>) -> (Vec<f32>, Vec<f32>) {
    let x = Tensor::<2>::ones(shape, &(device.clone().autodiff())).require_grad();
    let y = bias_dropout_add(x.clone(), None, None, draw);
    let gradient = x.grad(&y.clone().sum().backward()).unwrap();
    let values = |tensor: Tensor<2>| tensor.into_data().try_into_vec().unwrap();
    (values(y.inner()), values(gradient))
}

#[test]
fn masks_are_the_words_of_the_stream_bit_for_bit() {
    for (device, _) in devices() {
        for shape in [[1, 1], [3, 7], [5, 12], [9, 64], [4, 1000], [2, 4097]] {
            for draw in draws(shape[0] * shape[1]) {
                let expected = composed::mask(&draw.unwrap(), shape[0] * shape[1]);
                let (mask, gradient) = masks_of(&device, shape, draw);
                assert_eq!(mask, expected, "{device:?} {shape:?} {draw:?}");
                assert_eq!(
                    gradient, expected,
                    "gradient, {device:?} {shape:?} {draw:?}"
                );
            }
        }
    }
}

/// The gradient of the bias uses a different kernel. The gradient of `x` shows the masks of this kernel.
#[test]
fn masks_beside_a_bias_are_the_same() {
    for (device, _) in devices() {
        let device = device.autodiff();
        for shape in [[3, 7], [50, 12], [9, 64], [4, 1000]] {
            for draw in draws(shape[0] * shape[1]) {
                let x = Tensor::<2>::ones(shape, &device).require_grad();
                let bias = Tensor::<1>::zeros([shape[1]], &device).require_grad();
                let y = bias_dropout_add(x.clone(), Some(bias), None, draw);
                let gradient = x.grad(&y.clone().sum().backward()).unwrap();
                let expected = composed::mask(&draw.unwrap(), shape[0] * shape[1]);
                for values in [y.inner(), gradient] {
                    let values: Vec<f32> = values.into_data().try_into_vec().unwrap();
                    assert_eq!(values, expected, "{device:?} {shape:?} {draw:?}");
                }
            }
        }
    }
}

#[test]
fn parts_of_a_split_make_up_the_whole_mask() {
    let whole = composed::mask(&draw(0, 96, 96).unwrap(), 96);
    for (device, _) in devices() {
        // This is the second half of each of eight rows of width twelve.
        let (part, _) = masks_of(&device, [8, 6], draw(6, 6, 12));
        let expected: Vec<f32> = whole
            .chunks(12)
            .flat_map(|row| &row[6..])
            .copied()
            .collect();
        assert_eq!(part, expected);
    }
}

fn inputs(shape: [usize; 2]) -> Vec<Input> {
    vec![
        Input::wave(shape, 0.1),
        Input::wave([shape[1]], 0.5),
        Input::wave(shape, 0.8),
    ]
}

fn flat(
    operation: Operation<2>,
    shape: [usize; 2],
    bias: bool,
    residual: bool,
    draw: Option<Draw>,
) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
    move |leaves| {
        let bias = bias.then(|| leaves[1].clone());
        let residual = residual.then(|| leaves[2].clone().reshape(shape));
        operation(leaves[0].clone().reshape(shape), bias, residual, draw).flatten(0, 1)
    }
}

fn check_case(shape: [usize; 2], bias: bool, residual: bool, draw: Option<Draw>) {
    compare(
        &format!("{shape:?}, bias {bias}, residual {residual}, {draw:?}"),
        &inputs(shape),
        flat(bias_dropout_add, shape, bias, residual, draw),
        flat(composed::bias_dropout_add, shape, bias, residual, draw),
    );
}

#[test]
fn every_combination_is_the_composed_one() {
    for bias in [false, true] {
        for residual in [false, true] {
            for draw in [None, draw(0, 60, 60), draw(9, 5, 20)] {
                check_case([5, 12], bias, residual, draw);
            }
        }
    }
}

#[test]
fn any_width_fits() {
    for width in [1, 7, 33, 1000, 4097] {
        check_case([3, width], true, true, draw(2, 3 * width, 0));
    }
    check_case([300, 33], true, true, draw(4, 8, 16));
    check_case([130, 64], true, false, draw(0, 64, 128));
}

#[test]
fn gradients_are_those_of_differences() {
    for (bias, residual) in [(true, true), (true, false), (false, true)] {
        let operation = flat(bias_dropout_add, [3, 5], bias, residual, draw(1, 15, 0));
        assert_gradients("bias_dropout_add", &inputs([3, 5]), operation);
    }
}

#[test]
fn strided_and_sliced_inputs_are_taken() {
    let with = |operation: Operation<3>| {
        move |leaves: &[Tensor<1>]| {
            let x = leaves[0].clone().reshape([4, 5, 6]).swap_dims(0, 2);
            let x = x.narrow(0, 1, 4).narrow(2, 1, 3);
            let residual = leaves[2].clone().reshape([5, 4, 6]).swap_dims(0, 1);
            let residual = residual.narrow(2, 2, 3);
            let bias = leaves[1].clone().narrow(0, 3, 3);
            let y = operation(x, Some(bias), Some(residual), draw(5, 60, 0));
            (y.swap_dims(1, 2) * 2.0).flatten(0, 2)
        }
    };
    let inputs = inputs([20, 6]);
    let (ours, reference) = (with(bias_dropout_add), with(composed::bias_dropout_add));
    compare("strided", &inputs, ours, reference);
}

#[test]
fn a_residual_stream_in_f32_takes_16_bits() {
    for (device, dtypes) in devices() {
        for dtype in [DType::F16, DType::BF16] {
            if !dtypes.contains(&dtype) {
                continue;
            }
            let device = device.clone().autodiff();
            let of = |input: &Input, dtype: DType| {
                let values: Vec<f32> = input.values.iter().map(|x| *x as f32).collect();
                Tensor::<1>::from_floats(values.as_slice(), &device)
                    .cast(dtype)
                    .detach()
                    .require_grad()
            };
            let inputs = inputs([3, 8]);
            let run = |operation: Operation<2>| {
                let x = of(&inputs[0], dtype);
                let bias = of(&inputs[1], DType::F32);
                let residual = of(&inputs[2], DType::F32);
                let y = operation(
                    x.clone().reshape([3, 8]),
                    Some(bias.clone()),
                    Some(residual.clone().reshape([3, 8])),
                    draw(0, 24, 24),
                );
                assert_eq!(y.dtype(), DType::F32);
                let gradients = (y.clone() * y.clone()).sum().backward();
                let leaves = [x, bias, residual];
                let gradients = leaves.map(|leaf| leaf.grad(&gradients).unwrap());
                assert_eq!(
                    gradients.clone().map(|g| g.dtype()),
                    [dtype, DType::F32, DType::F32]
                );
                let mut all = vec![y.inner().flatten::<1>(0, 1)];
                all.extend(gradients.map(|gradient| gradient.cast(DType::F32)));
                Tensor::cat(all, 0)
                    .into_data()
                    .try_into_vec::<f32>()
                    .unwrap()
            };
            let (ours, reference) = (run(bias_dropout_add), run(composed::bias_dropout_add));
            for (ours, reference) in ours.iter().zip(&reference) {
                assert!((ours - reference).abs() <= 1e-2 * reference.abs().max(1.0));
            }
        }
    }
}

#[test]
fn a_dropped_nan_stays_visible() {
    let x = Tensor::<2>::from_data([[f32::NAN; 64]], &Device::flex());
    let y = bias_dropout_add(x, None, None, draw(0, 64, 64));
    let values: Vec<f32> = y.into_data().try_into_vec().unwrap();
    assert!(values.iter().all(|x| x.is_nan()));
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let shape = [700, 100];
    let operation = flat(bias_dropout_add, shape, true, true, draw(7, 70_000, 0));
    let run = || {
        evaluate(
            &inputs(shape),
            &Device::flex(),
            DType::F32,
            DType::F32,
            &operation,
        )
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    let (one, many) = (pool.install(run), run());
    assert_eq!(one.output, many.output);
    assert_eq!(one.gradients, many.gradients);
}

#[test]
fn nothing_gives_nothing_and_no_draw_keeps_all() {
    for (device, _) in devices() {
        let none = Tensor::<2>::zeros([0, 12], &device);
        let y = bias_dropout_add(none.clone(), None, Some(none), draw(0, 1, 1));
        assert_eq!(y.dims(), [0, 12]);
        let x = Tensor::<2>::ones([2, 3], &device);
        let kept = Draw {
            probability: 0.0,
            ..draw(0, 6, 6).unwrap()
        };
        let y = bias_dropout_add(x.clone(), None, Some(x.clone()), Some(kept));
        y.into_data()
            .assert_eq(&(x.clone() + x.clone()).into_data(), true);
        let y = bias_dropout_add(x.clone(), None, None, None);
        y.into_data().assert_eq(&x.into_data(), true);
    }
}

/// Returns the panic message of `work`.
fn message(work: impl FnOnce() -> Tensor<2>) -> String {
    let work = std::panic::AssertUnwindSafe(work);
    let panic = std::panic::catch_unwind(work).expect_err("the call must fail");
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(_) => panic!("a panic without a message"),
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for operation in [bias_dropout_add as Operation<2>, composed::bias_dropout_add] {
        insta::allow_duplicates!(for (device, _) in devices() {
            let ones = |shape: [usize; 2]| Tensor::<2>::ones(shape, &device);
            let refusal = |draw| message(|| operation(ones([2, 3]), None, None, draw));
            for (probability, shown) in [(-0.1, "-0.1"), (1.0, "1"), (f64::NAN, "NaN")] {
                let draw = Draw {
                    probability,
                    ..draw(0, 6, 6).unwrap()
                };
                assert_eq!(
                    refusal(Some(draw)),
                    format!(
                        "bias_dropout_add: invalid probability = {shown}: expected at least 0 and \
                         below 1"
                    )
                );
            }
            assert_snapshot!(
                refusal(draw(0, 0, 6)),
                @"bias_dropout_add: invalid run = 0: expected at least 1"
            );
            assert_snapshot!(
                refusal(draw(u64::MAX - 5, 2, 2)),
                @"bias_dropout_add: invalid first = 18446744073709551610 with a pitch of 2: expected \
                  one whose last draw is below 2^64"
            );
            let bias = Tensor::<1>::ones([2], &device);
            assert_snapshot!(
                message(|| operation(ones([2, 3]), Some(bias), None, None)),
                @"bias_dropout_add: a bias [2] does not fit x [2, 3]: expected [3]"
            );
            assert_snapshot!(
                message(|| operation(ones([2, 3]), None, Some(ones([3, 2])), None)),
                @"bias_dropout_add: a residual [3, 2] does not fit x [2, 3]: expected the same shape"
            );
            let short = ones([2, 3]).cast(DType::F16);
            assert_snapshot!(
                message(|| operation(ones([2, 3]), None, Some(short), None)),
                @"bias_dropout_add does not support F16 on a residual for x in F32: expected F32"
            );
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_draw_is_the_composed_one(
        rows in 1..40usize,
        width in 1..90usize,
        first in 0..u64::MAX / 4,
        run in 1..200usize,
        pitch in 0..1u64 << 40,
        (bias, residual) in (any::<bool>(), any::<bool>()),
    ) {
        let shape = [rows, width];
        let run = |operation: Operation<2>| {
            let operation = flat(operation, shape, bias, residual, draw(first, run, pitch));
            let result = evaluate(&inputs(shape), &Device::flex(), DType::F64, DType::F64, &operation);
            let gradients = result.gradients.into_iter().flatten();
            result.output.into_iter().chain(gradients).collect::<Vec<_>>()
        };
        let (ours, reference) = (run(bias_dropout_add), run(composed::bias_dropout_add));
        for (ours, reference) in ours.iter().zip(&reference) {
            prop_assert!((ours - reference).abs() < 1e-11, "{ours} and {reference}");
        }
    }
}
