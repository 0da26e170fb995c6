use burn::tensor::{DType, Device, Tensor, TensorData};

use super::super::{accumulate_grouped_weight_gradient_at, composed, grouped_matmul};
use super::*;
use crate::cube::cube_device;
use crate::testing::{Input, assert_close, devices, evaluate, tolerance};

/// Returns the rows per expert, the inputs and the outputs of test cases. The cases are several tiles, empty experts,
/// all rows in one expert, and sizes that are not a multiple of a tile.
fn cases() -> Vec<(Vec<usize>, usize, usize)> {
    vec![
        (vec![4, 4, 4], 8, 16),
        (vec![37, 0, 1, 200, 0, 129], 136, 200),
        (vec![0, 300, 0, 0], 32, 72),
        (vec![64, 128, 65], 264, 128),
        (vec![1, 31], 40, 8),
    ]
}

/// Returns each device and type for which there are tensor cores. Prints why other devices are skipped.
fn matrix_units() -> Vec<(Device, DType)> {
    let mut all = vec![];
    for (device, types) in devices() {
        let Some(cube) = cube_device(device.as_dispatch()) else {
            continue;
        };
        let client = cube.client();
        for dtype in types {
            match missing_support(&client, dtype) {
                None => all.push((device.clone(), dtype)),
                Some(reason) => println!("left out: {reason}"),
            }
        }
    }
    all
}

fn wave<const D: usize>(shape: [usize; D], phase: f64, device: &Device, dtype: DType) -> Tensor<D> {
    let data = TensorData::new(Input::wave(shape.to_vec(), phase).values, shape);
    Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
}

fn doubles<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// Returns the product of flat rows and flat weights. If `transposed` is true, the weights are transposed in memory.
fn product(
    x: &[Tensor<1>],
    (sizes, inputs, outputs): &(Vec<usize>, usize, usize),
    transposed: bool,
    by: impl Fn(Tensor<2>, Tensor<3>, &[usize]) -> Tensor<2>,
) -> Tensor<1> {
    let (rows, experts) = (sizes.iter().sum::<usize>(), sizes.len());
    let weights = x[1].clone();
    let weights = if transposed {
        weights
            .reshape([experts, *outputs, *inputs])
            .swap_dims(1, 2)
    } else {
        weights.reshape([experts, *inputs, *outputs])
    };
    by(x[0].clone().reshape([rows, *inputs]), weights, sizes).reshape([rows * outputs])
}

#[test]
fn one_launch_equals_the_composition_and_the_loop_over_experts() {
    for (device, dtype) in matrix_units() {
        for case in cases() {
            let (sizes, inputs, outputs) = &case;
            let (rows, experts) = (sizes.iter().sum::<usize>(), sizes.len());
            let leaves = [
                Input::wave([rows, *inputs], 0.2),
                Input::wave([experts, *inputs, *outputs], 0.5),
            ];
            // The number of terms of the longest sums is the largest dimension of the three matrix multiplications.
            let terms = rows.max(*inputs).max(*outputs) as f64;
            let tolerance = terms.sqrt() * tolerance(dtype);
            for transposed in [false, true] {
                let composed = |x: &[_]| product(x, &case, transposed, composed::grouped_matmul);
                let ours = |x: &[_]| product(x, &case, transposed, grouped_matmul);
                let run =
                    |one| with_one_launch(one, || evaluate(&leaves, &device, dtype, dtype, &ours));
                let expected = evaluate(&leaves, &Device::flex(), DType::F64, dtype, &composed);
                let what = format!("{case:?} in {dtype:?}, transposed {transposed}");
                let actual = run(true);
                assert_close(&what, &expected, &actual, tolerance);
                assert_close(
                    &format!("{what}, by a loop"),
                    &run(false),
                    &actual,
                    tolerance,
                );
            }
        }
    }
}

/// Gradients in f32 are exact up to the order of their sums, because products of two 16-bit values are exact in f32.
#[test]
fn gradients_are_written_and_added_in_f32() {
    for (device, dtype) in matrix_units() {
        for ((sizes, inputs, outputs), offset) in cases().into_iter().zip([0, 3, 2, 5, 1]) {
            let (rows, length) = (sizes.iter().sum::<usize>(), sizes.len() * inputs * outputs);
            for add in [false, true] {
                let run = |device: &Device, one: bool| {
                    let wide = if one { DType::F32 } else { DType::F64 };
                    let factor = |columns, phase| {
                        let factor = wave([rows, columns], phase, device, dtype);
                        if one { factor } else { factor.cast(wide) }
                    };
                    let flat = wave([length + 9], 0.4, device, DType::F32).cast(wide);
                    let (x, dy) = (factor(inputs, 0.2), factor(outputs, 0.7));
                    let add =
                        || accumulate_grouped_weight_gradient_at(x, dy, &sizes, flat, offset, add);
                    doubles(if one {
                        with_one_launch(true, add)
                    } else {
                        add()
                    })
                };
                let (actual, expected) = (run(&device, true), run(&Device::flex(), false));
                for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                    let bound = 1e-5 * (1.0 + expected.abs()) * (rows as f64).sqrt();
                    assert!(
                        (actual - expected).abs() <= bound,
                        "{sizes:?} in {dtype:?}, add {add}: {i}: {actual} and {expected}"
                    );
                }
                // Elements outside of the gradient are exact, and so are the gradients of experts without rows.
                let of_expert = inputs * outputs;
                for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                    let expert = i.checked_sub(offset).map(|i| i / of_expert);
                    let rows = expert.and_then(|expert| sizes.get(expert));
                    if rows.is_none_or(|rows| *rows == 0) {
                        assert_eq!(actual, expected, "{sizes:?}, add {add}: {i}");
                    }
                }
            }
        }
    }
}

#[test]
fn rows_have_the_same_bits_in_every_run_and_wherever_they_are() {
    for (device, dtype) in matrix_units() {
        let (sizes, inputs, outputs) = ([130, 0, 77], 72, 136);
        let x = wave([207, inputs], 0.2, &device, dtype);
        let dy = wave([207, outputs], 0.7, &device, dtype);
        let weights = wave([3, inputs, outputs], 0.5, &device, dtype);
        let run = |x: Tensor<2>, dy: Tensor<2>, weights: Tensor<3>, sizes: &[usize]| {
            with_one_launch(true, || {
                let length = weights.shape().num_elements();
                let flat = Tensor::zeros([length], (&device, DType::F32));
                let y = grouped_matmul(x.clone(), weights, sizes);
                let dw = accumulate_grouped_weight_gradient_at(x, dy, sizes, flat, 0, false);
                [doubles(y), doubles(dw)]
            })
        };
        let all = run(x.clone(), dy.clone(), weights.clone(), &sizes);
        assert_eq!(all, run(x.clone(), dy.clone(), weights.clone(), &sizes));
        let last = |x: Tensor<2>| x.narrow(0, 130, 77);
        let alone = run(last(x), last(dy), weights.narrow(0, 2, 1), &[77]);
        assert_eq!(all[0][130 * outputs..], alone[0]);
        assert_eq!(all[1][2 * inputs * outputs..], alone[1]);
    }
}

#[test]
fn widths_without_whole_chunks_are_left_to_the_loop() {
    for (device, dtype) in matrix_units() {
        for [inputs, outputs] in [[12, 16], [16, 12], [16, 1]] {
            let x = wave([5, inputs], 0.2, &device, dtype);
            let weights = wave([2, inputs, outputs], 0.5, &device, dtype);
            let run = || grouped_matmul(x.clone(), weights.clone(), &[2, 3]);
            let [one, each] = [true, false].map(|one| doubles(with_one_launch(one, run)));
            assert_eq!(one, each, "[{inputs}, {outputs}] in {dtype:?}");
        }
    }
}
