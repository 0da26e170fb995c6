use burn::tensor::{DType, Device, Tensor, TensorData};
use insta::assert_snapshot;

use super::*;
use crate::testing::{Input, assert_close, compare_within, devices, evaluate, tolerance};

/// Returns the rows per expert, the inputs and the outputs of test cases. The cases are equal groups, skewed groups,
/// several blocks, empty experts in all positions, and no rows.
fn cases() -> Vec<(Vec<usize>, usize, usize)> {
    vec![
        (vec![4, 4, 4], 8, 16),
        (vec![1, 0, 37, 2, 0], 5, 7),
        (vec![0, 0, 600], 24, 9),
        (vec![0, 300, 0, 3], 300, 40),
        (vec![13], 1, 1),
        (vec![0, 0], 6, 4),
    ]
}

fn matrix(x: &Tensor<1>, rows: usize) -> Tensor<2> {
    let columns = x.dims()[0].checked_div(rows).unwrap_or(0);
    x.clone().reshape([rows, columns])
}

#[test]
fn products_and_gradients_equal_a_loop_over_experts() {
    for (number, (sizes, inputs, outputs)) in cases().into_iter().enumerate() {
        let (rows, experts) = (sizes.iter().sum::<usize>(), sizes.len());
        if rows == 0 {
            continue;
        }
        for transposed in [false, true] {
            let weights = |x: &Tensor<1>| {
                if transposed {
                    x.clone()
                        .reshape([experts, outputs, inputs])
                        .swap_dims(1, 2)
                } else {
                    x.clone().reshape([experts, inputs, outputs])
                }
            };
            let leaves = [
                Input::wave([rows, inputs], 0.2),
                Input::wave([experts, inputs, outputs], 0.5),
            ];
            let ours = |x: &[Tensor<1>]| {
                let product = grouped_matmul(matrix(&x[0], rows), weights(&x[1]), &sizes);
                product.reshape([rows * outputs])
            };
            let composed = |x: &[Tensor<1>]| {
                let product = composed::grouped_matmul(matrix(&x[0], rows), weights(&x[1]), &sizes);
                product.reshape([rows * outputs])
            };
            // The number of terms of the longest sums is the largest dimension of the three matrix multiplications.
            let factor = (inputs.max(outputs).max(rows) as f64).sqrt();
            let name =
                format!("groups {sizes:?} of [{inputs}, {outputs}], transposed {transposed}");
            if number < 2 {
                compare_within(factor, &name, &leaves, ours, composed);
                continue;
            }
            // Other cases run only on the CPU. On other devices each size would be tuned, and single multiplications
            // are covered by the tests of `gemm`.
            let (cpu, types) = devices().remove(0);
            for dtype in types {
                let expected = evaluate(&leaves, &cpu, DType::F64, dtype, &composed);
                let actual = evaluate(&leaves, &cpu, dtype, dtype, &ours);
                let what = format!("{name} in {dtype:?}");
                assert_close(&what, &expected, &actual, factor * tolerance(dtype));
            }
        }
    }
}

fn wave<const D: usize>(shape: [usize; D], phase: f64, device: &Device, dtype: DType) -> Tensor<D> {
    let data = TensorData::new(Input::wave(shape.to_vec(), phase).values, shape);
    Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
}

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[test]
fn gradients_go_into_a_flat_buffer() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for (sizes, inputs, outputs) in cases() {
                let (rows, experts) = (sizes.iter().sum::<usize>(), sizes.len());
                let x = wave([rows, inputs], 0.2, &device, dtype);
                let dy = wave([rows, outputs], 0.7, &device, dtype);
                let length = experts * inputs * outputs;
                let flat = || wave([length + 5], 0.4, &device, wide(dtype));
                let before = floats(flat());
                let alone = Tensor::zeros([length], (&device, wide(dtype)));
                let alone = accumulate_grouped_weight_gradient_at(
                    x.clone(),
                    dy.clone(),
                    &sizes,
                    alone,
                    0,
                    false,
                );
                let alone = floats(alone);
                // The gradient of an expert without rows is exactly 0.
                let of_expert = alone.chunks(inputs * outputs).zip(&sizes);
                for (gradient, _) in of_expert.filter(|(_, size)| **size == 0) {
                    assert!(gradient.iter().all(|x| *x == 0.0));
                }
                for add in [false, true] {
                    let what = format!("{sizes:?} in {dtype:?} on {device:?}, add {add}");
                    let flat = accumulate_grouped_weight_gradient_at(
                        x.clone(),
                        dy.clone(),
                        &sizes,
                        flat(),
                        3,
                        add,
                    );
                    for (i, actual) in floats(flat).into_iter().enumerate() {
                        let inside = (3..3 + length).contains(&i);
                        let old = if inside && !add { 0.0 } else { before[i] };
                        let expected = old + if inside { alone[i - 3] } else { 0.0 };
                        let bound = if wide(dtype) == DType::F64 {
                            1e-12
                        } else {
                            2e-6
                        };
                        let bound = bound * (1.0 + expected.abs()) * (rows as f64 + 1.0).sqrt();
                        assert!(
                            (actual - expected).abs() <= bound,
                            "{what}: {i}: {actual} {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_weight_gradient_exists_without_rows() {
    for (device, _) in devices() {
        let x = Tensor::<2>::ones([3, 4], &device.clone().autodiff());
        let weights = Tensor::<3>::ones([3, 4, 2], &device.clone().autodiff()).require_grad();
        let gradients = grouped_matmul(x, weights.clone(), &[0, 3, 0])
            .sum()
            .backward();
        let gradient = floats(weights.grad(&gradients).expect("of all experts"));
        assert_eq!(gradient, [[0.0; 8], [3.0; 8], [0.0; 8]].concat());
        let none = Tensor::<2>::empty([0, 4], &device.clone().autodiff());
        let gradients = grouped_matmul(none, weights.clone(), &[0, 0, 0])
            .sum()
            .backward();
        let gradient = floats(weights.grad(&gradients).expect("of all experts"));
        assert_eq!(gradient, [0.0; 24]);
    }
}

#[test]
fn results_are_the_same_for_any_number_of_threads() {
    let device = Device::flex();
    let sizes = [700, 0, 90];
    let x = wave([790, 96], 0.2, &device, DType::F32);
    let dy = wave([790, 128], 0.6, &device, DType::F32);
    let weights = wave([3, 96, 128], 0.4, &device, DType::F32);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let y = grouped_matmul(x.clone(), weights.clone(), &sizes);
            [
                floats(y),
                floats(grouped_weight_gradient(x.clone(), dy.clone(), &sizes)),
            ]
        })
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(3));
    // The rows of an expert have the same bits at any position.
    let last = x.clone().narrow(0, 700, 90);
    let own = weights.clone().narrow(0, 2, 1);
    let alone = floats(grouped_matmul(last.clone(), own, &[90]));
    assert_eq!(one[0][700 * 128..], alone);
    let alone = floats(grouped_weight_gradient(
        last,
        dy.clone().narrow(0, 700, 90),
        &[90],
    ));
    assert_eq!(one[1][2 * 96 * 128..], alone);
}

#[test]
fn sizes_and_types_that_do_not_agree_are_refused() {
    let device = Device::flex();
    let message = |call: &dyn Fn()| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        let panic = panic.expect_err("the call must fail");
        panic.downcast_ref::<String>().cloned().unwrap()
    };
    let x = || Tensor::<2>::ones([4, 3], &device);
    let weights = |experts| Tensor::<3>::ones([experts, 3, 2], &device);
    assert_snapshot!(
        message(&|| drop(grouped_matmul(x(), weights(2), &[1, 2]))),
        @"grouped_matmul: x is [4, 3], the weights [2, 3, 2], with 2 groups of 3 rows: expected [rows, in], \
          [experts, in, out], and a group for each expert, of all rows together"
    );
    assert!(message(&|| drop(grouped_matmul(x(), weights(3), &[2, 2]))).contains("with 2 groups"));
    assert_snapshot!(
        message(&|| drop(grouped_matmul(x(), weights(2).cast(DType::F64), &[2, 2]))),
        @"grouped_matmul: invalid type of the weights = F64 with x in F32: expected the type of x"
    );
    let into = |rows: usize, flat: Tensor<1>, offset: usize| {
        let dy = Tensor::ones([rows, 2], &device);
        drop(accumulate_grouped_weight_gradient_at(
            x(),
            dy,
            &[4],
            flat,
            offset,
            true,
        ))
    };
    assert_snapshot!(
        message(&|| into(3, Tensor::ones([9], &device), 0)),
        @"grouped_matmul: x has 4 rows, the gradient 3: expected equal numbers of rows"
    );
    assert_snapshot!(
        message(&|| into(4, Tensor::ones([9], &device), 4)),
        @"grouped_matmul: 6 elements from element 4 on reach past a flat buffer of 9: expected at least 10"
    );
    assert_snapshot!(
        message(&|| into(4, Tensor::ones([9], (&device, DType::F16)), 0)),
        @"grouped_matmul: invalid type of the flat buffer = F16 with x in F32: expected F32, or F64 for F64"
    );
}
