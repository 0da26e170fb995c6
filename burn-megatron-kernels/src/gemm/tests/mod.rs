use burn::tensor::{DType, Device, Tensor, TensorData};
use insta::assert_snapshot;
use proptest::prelude::*;

use super::*;
use crate::cpu::wide;
use crate::testing::{Input, devices};

mod at;
mod blas;

fn matrix(sizes: [usize; 2], phase: f64, device: &Device, dtype: DType) -> Tensor<2> {
    let values = Input::wave(sizes, phase).values;
    let data = TensorData::new(values, sizes).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

fn row(count: usize, phase: f64, device: &Device, dtype: DType) -> Tensor<1> {
    matrix([1, count], phase, device, dtype).reshape([count])
}

fn doubles<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    let data = tensor.into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

/// Asserts that the values differ by at most `tolerance`, relative to the largest expected value.
fn assert_near(what: &str, actual: Tensor<2>, expected: Tensor<2>, tolerance: f64) {
    assert_eq!(actual.dims(), expected.dims(), "{what}");
    let (actual, expected) = (doubles(actual), doubles(expected));
    let largest = expected.iter().fold(1e-30f64, |most, x| most.max(x.abs()));
    for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        assert!(
            (actual - expected).abs() <= tolerance * largest,
            "{what}: element {i} is {actual} and should be {expected}"
        );
    }
}

/// Returns the tolerance. It allows for one rounding of the result, and for sums of up to 300 terms in f32 or f64. In
/// f32, the error of the sum is at most 300 / 2^24 = 1.8e-5 of the sum of magnitudes. The order of the additions
/// differs between libraries and processors.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-13,
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}

const SIZES: [[usize; 3]; 7] = [
    [1, 1, 1],
    [3, 5, 7],
    [1, 64, 33],
    [33, 1, 64],
    [64, 33, 1],
    [100, 130, 70],
    [65, 300, 129],
];

/// Returns the same values, transposed in memory.
fn turned(x: Tensor<2>) -> Tensor<2> {
    let sizes = x.dims();
    let data = x.clone().transpose().into_data();
    let stored = Tensor::<2>::from_data(data, (&x.device(), x.dtype()));
    assert_eq!(stored.dims(), [sizes[1], sizes[0]]);
    stored.transpose()
}

/// Returns the same values as a slice of a larger matrix.
fn framed(x: Tensor<2>) -> Tensor<2> {
    let [rows, columns] = x.dims();
    let zeros = Tensor::zeros([rows + 2, columns + 3], (&x.device(), x.dtype()));
    zeros
        .slice_assign([1..rows + 1, 2..columns + 2], x)
        .slice([1..rows + 1, 2..columns + 2])
}

#[test]
fn linear_agrees_in_every_type_with_and_without_a_bias() {
    let flex = Device::flex();
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            for [rows, inputs, outputs] in SIZES {
                for with_bias in [false, true] {
                    let made = |device: &Device| {
                        let x = matrix([rows, inputs], 0.1, device, dtype);
                        let weight = matrix([inputs, outputs], 0.5, device, dtype);
                        (
                            x,
                            weight,
                            with_bias.then(|| row(outputs, 0.8, device, dtype)),
                        )
                    };
                    let (x, weight, bias) = made(&flex);
                    let double = |x: Tensor<2>| x.cast(DType::F64);
                    let bias = bias.map(|bias| bias.cast(DType::F64));
                    let expected = composed::linear(double(x), double(weight), bias);
                    let (x, weight, bias) = made(&device);
                    let what = format!("{dtype:?} [{rows}, {inputs}, {outputs}] on {device:?}");
                    let forms = [
                        (x.clone(), weight.clone()),
                        (turned(x.clone()), weight.clone()),
                        (x.clone(), turned(weight.clone())),
                        (framed(x), framed(turned(weight))),
                    ];
                    for (x, weight) in forms {
                        let y = linear(x, weight, bias.clone());
                        assert_eq!(y.dtype(), dtype);
                        assert_near(&what, y, expected.clone(), tolerance(dtype));
                    }
                }
            }
        }
    }
}

#[test]
fn weight_gradients_are_added_in_every_type() {
    let flex = Device::flex();
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            let own = wide(dtype);
            for [rows, inputs, outputs] in SIZES {
                let made = |device: &Device| {
                    let x = matrix([rows, inputs], 0.1, device, dtype);
                    let gradient = matrix([rows, outputs], 0.5, device, dtype);
                    (x, gradient, matrix([inputs, outputs], 0.8, device, own))
                };
                let (x, gradient, into) = made(&flex);
                let double = |x: Tensor<2>| x.cast(DType::F64);
                let expected =
                    composed::accumulate_weight_gradient(double(x), double(gradient), double(into));
                let (x, gradient, into) = made(&device);
                let what = format!("{dtype:?} [{rows}, {inputs}, {outputs}] on {device:?}");
                let forms = [
                    (x.clone(), gradient.clone(), into.clone()),
                    (turned(x.clone()), framed(gradient.clone()), into.clone()),
                    (framed(x), turned(gradient), turned(into.clone())),
                ];
                for (x, gradient, into) in forms {
                    let sum = accumulate_weight_gradient(x, gradient, into);
                    assert_eq!(sum.dtype(), own);
                    // Sums are in f32 for all element types except f64.
                    assert_near(&what, sum, expected.clone(), tolerance(own));
                }
                assert_near(&what, into, matrix([inputs, outputs], 0.8, &flex, own), 0.0);
            }
        }
    }
}

#[test]
fn sums_of_16_bit_factors_are_made_in_f32() {
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            // If ones are added one by one, the sum stops at 2048 in f16 and at 256 in bf16.
            let ones = |sizes| Tensor::<2>::ones(sizes, (&device, dtype));
            let count = 4096;
            let y = linear(ones([3, count]), ones([count, 5]), None);
            assert_eq!(doubles(y), [count as f64; 15], "{dtype:?} on {device:?}");
            let into = Tensor::<2>::zeros([3, 5], (&device, wide(dtype)));
            let sum = accumulate_weight_gradient(ones([count, 3]), ones([count, 5]), into);
            assert_eq!(doubles(sum), [count as f64; 15], "{dtype:?} on {device:?}");
        }
    }
}

#[test]
fn empty_sizes_have_a_result() {
    for (device, _) in devices() {
        let zeros = |sizes| Tensor::<2>::zeros(sizes, &device);
        let bias = || Some(row(4, 0.3, &device, DType::F32));
        assert_eq!(linear(zeros([0, 3]), zeros([3, 4]), bias()).dims(), [0, 4]);
        let y = linear(zeros([2, 0]), zeros([0, 4]), bias());
        let twice = [0, 1].map(|_| doubles(row(4, 0.3, &device, DType::F32)));
        assert_eq!(doubles(y), twice.concat());
        assert_eq!(
            doubles(linear(zeros([2, 0]), zeros([0, 4]), None)),
            [0.0; 8]
        );
        let into = matrix([3, 4], 0.2, &device, DType::F32);
        let sum = accumulate_weight_gradient(zeros([0, 3]), zeros([0, 4]), into.clone());
        assert_eq!(doubles(sum), doubles(into));
        let none = accumulate_weight_gradient(zeros([2, 0]), zeros([2, 4]), zeros([0, 4]));
        assert_eq!(none.dims(), [0, 4]);
    }
}

#[test]
fn a_uniquely_owned_matrix_is_written_in_place_and_a_shared_one_is_copied() {
    let place = |tensor: Tensor<2>| {
        let flex = tensor.try_into_primitive::<burn::backend::Flex>();
        flex.expect("the tensor is on Flex").bytes().as_ptr() as usize
    };
    for dtype in [DType::F32, DType::BF16] {
        let device = Device::flex();
        let into = Tensor::<2>::ones([8, 16], &device);
        let before = place(into.clone());
        let x = matrix([32, 8], 0.1, &device, dtype);
        let sum = accumulate_weight_gradient(x, matrix([32, 16], 0.2, &device, dtype), into);
        assert_eq!(place(sum), before);
    }
    for (device, _) in devices() {
        let into = Tensor::<2>::ones([8, 16], &device);
        let x = matrix([32, 8], 0.1, &device, DType::F32);
        let gradient = matrix([32, 16], 0.2, &device, DType::F32);
        let sum = accumulate_weight_gradient(x, gradient, into.clone());
        assert!(doubles(sum).iter().all(|x| *x != 1.0));
        assert_eq!(doubles(into), [1.0; 128]);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let run = |threads: usize, [rows, inputs, outputs]: [usize; 3]| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let device = Device::flex();
        let work = || {
            let x = matrix([rows, inputs], 0.1, &device, DType::F32);
            let y = linear(
                x.clone(),
                matrix([inputs, outputs], 0.4, &device, DType::F32),
                Some(row(outputs, 0.3, &device, DType::F32)),
            );
            let zeros = Tensor::zeros([inputs, outputs], &device);
            let sum = accumulate_weight_gradient(x, y.clone(), zeros);
            (y.into_data(), sum.into_data())
        };
        pool.expect("a pool can be built").install(work)
    };
    // The cases are small sizes, and sizes that are split in every direction.
    for sizes in [
        [7, 9, 11],
        [300, 257, 129],
        [33, 1500, 300],
        [1200, 40, 900],
    ] {
        let (y, sum) = run(1, sizes);
        for threads in [2, 3, 8] {
            let (other, other_sum) = run(threads, sizes);
            other.assert_eq(&y, true);
            other_sum.assert_eq(&sum, true);
        }
    }
}

#[test]
fn strides_determine_the_layout_of_a_matrix() {
    let matrix_of = |sizes, strides| {
        Matrix::of(sizes, strides).map(|matrix| (matrix.leading, matrix.transposed))
    };
    assert_eq!(matrix_of([3, 5], [5, 1]), Some((5, false)));
    assert_eq!(matrix_of([3, 5], [8, 1]), Some((8, false)));
    assert_eq!(matrix_of([3, 5], [1, 3]), Some((3, true)));
    assert_eq!(matrix_of([3, 5], [1, 4]), Some((4, true)));
    // The strides belong to matrices that are expanded, overlapping, reversed, or have gaps in both directions.
    for strides in [[0, 1], [1, 0], [4, 1], [1, 2], [-5, 1], [10, 2]] {
        assert_eq!(matrix_of([3, 5], strides), None, "{strides:?}");
    }
    // The stride of a dimension of size one is irrelevant.
    assert_eq!(matrix_of([1, 5], [77, 1]), Some((5, false)));
    assert_eq!(matrix_of([1, 5], [1, 9]), Some((9, true)));
    assert_eq!(matrix_of([3, 1], [1, 77]), Some((1, false)));
    assert_eq!(matrix_of([3, 1], [9, 1]), Some((9, false)));
    assert_eq!(matrix_of([1, 1], [0, 0]), Some((1, false)));
    assert_eq!(matrix_of([0, 5], [5, 1]), Some((5, false)));
    let matrix = Matrix::of([3, 5], [8, 1]);
    let turned = matrix.map(Matrix::transpose);
    assert_eq!(turned, Matrix::of([5, 3], [1, 8]));
}

fn problem(left: Matrix, right: Matrix) -> GemmProblem {
    GemmProblem {
        left,
        right,
        factors: DType::BF16,
        result: DType::BF16,
        epilogue: Epilogue::Nothing,
    }
}

fn lying(sizes: [usize; 2], strides: [isize; 2]) -> Matrix {
    Matrix::of(sizes, strides).expect("the strides are those of a matrix")
}

#[test]
fn the_three_products_of_a_linear_layer_in_the_terms_of_blas() {
    let (rows, inputs, outputs) = (6, 4, 10);
    let operand = |rows, columns, leading, transpose| Operand {
        rows,
        columns,
        leading,
        transpose,
    };
    let x = lying([rows, inputs], [4, 1]);
    let weight = lying([inputs, outputs], [10, 1]);
    let gradient = lying([rows, outputs], [10, 1]);
    let forward = problem(x, weight).column_major();
    assert_eq!((forward.m, forward.n, forward.k), (outputs, rows, inputs));
    assert_eq!(forward.a, operand(outputs, inputs, 10, false));
    assert_eq!(forward.b, operand(inputs, rows, 4, false));
    assert_eq!(forward.result(), operand(outputs, rows, 10, false));
    let of_input = problem(gradient, weight.transpose()).column_major();
    assert_eq!(
        (of_input.m, of_input.n, of_input.k),
        (inputs, rows, outputs)
    );
    assert_eq!(of_input.a, operand(outputs, inputs, 10, true));
    assert_eq!(of_input.b, operand(outputs, rows, 10, false));
    let of_weight = problem(x.transpose(), gradient).column_major();
    assert_eq!(
        (of_weight.m, of_weight.n, of_weight.k),
        (outputs, inputs, rows)
    );
    assert_eq!(of_weight.a, operand(outputs, rows, 10, false));
    assert_eq!(of_weight.b, operand(inputs, rows, 4, true));
    // The rows have gaps between them.
    let pitched = problem(lying([rows, inputs], [128, 1]), weight).column_major();
    assert_eq!(pitched.b, operand(inputs, rows, 128, false));
}

/// Returns the column-major result of a library for this description.
fn blas(description: ColumnMajor, a: &[f64], b: &[f64]) -> Vec<f64> {
    let at = |values: &[f64], operand: Operand, row: usize, column: usize| {
        let (row, column) = if operand.transpose {
            (column, row)
        } else {
            (row, column)
        };
        assert!(row < operand.rows && column < operand.columns);
        values[row + column * operand.leading]
    };
    let mut d = vec![0.0; description.leading * description.n];
    for column in 0..description.n {
        for row in 0..description.m {
            d[row + column * description.leading] = (0..description.k)
                .map(|i| at(a, description.a, row, i) * at(b, description.b, i, column))
                .sum();
        }
    }
    d
}

/// Returns the memory of a matrix with the values `of(row, column)`.
fn stored(matrix: Matrix, of: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let lines = if matrix.transposed {
        matrix.columns
    } else {
        matrix.rows
    };
    let mut values = vec![f64::NAN; lines * matrix.leading];
    for row in 0..matrix.rows {
        for column in 0..matrix.columns {
            let (line, at) = if matrix.transposed {
                (column, row)
            } else {
                (row, column)
            };
            values[line * matrix.leading + at] = of(row, column);
        }
    }
    values
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_column_major_library_writes_the_row_major_product(
        sizes in [1usize..6, 1usize..6, 1usize..6],
        gaps in [0usize..3, 0usize..3],
        turned in [any::<bool>(), any::<bool>()],
    ) {
        let [rows, columns, depth] = sizes;
        let lie = |rows: usize, columns: usize, gap: usize, transposed: bool| Matrix {
            rows,
            columns,
            leading: gap + if transposed { rows } else { columns },
            transposed,
        };
        let left = lie(rows, depth, gaps[0], turned[0]);
        let right = lie(depth, columns, gaps[1], turned[1]);
        let l = |row: usize, column: usize| (row * 7 + column * 3 + 1) as f64;
        let r = |row: usize, column: usize| (row * 5 + column * 11 + 2) as f64;
        let description = problem(left, right).column_major();
        let result = blas(description, &stored(right, r), &stored(left, l));
        for row in 0..rows {
            for column in 0..columns {
                let expected: f64 = (0..depth).map(|i| l(row, i) * r(i, column)).sum();
                prop_assert_eq!(result[row * columns + column], expected);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn any_sizes_agree(
        sizes in [0usize..70, 0usize..70, 0usize..70],
        turns in [any::<bool>(), any::<bool>()],
    ) {
        let device = Device::flex();
        let [rows, inputs, outputs] = sizes;
        let turn = |x: Tensor<2>, turn: bool| if turn { turned(x) } else { x };
        let x = turn(matrix([rows, inputs], 0.1, &device, DType::F64), turns[0]);
        let weight = turn(matrix([inputs, outputs], 0.5, &device, DType::F64), turns[1]);
        let y = linear(x.clone(), weight.clone(), None);
        assert_near("linear", y.clone(), composed::linear(x.clone(), weight.clone(), None), 1e-13);
        let sum = accumulate_weight_gradient(x.clone(), y.clone(), weight.clone());
        let expected = composed::accumulate_weight_gradient(x, y, weight);
        assert_near("accumulate", sum, expected, 1e-13);
    }
}

fn message(work: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let panic = panic.expect_err("the call must fail");
    let text = panic.downcast_ref::<String>().cloned();
    text.expect("the panic has a message")
}

#[test]
fn what_does_not_fit_is_named_on_every_device() {
    insta::allow_duplicates!(for (device, _) in devices() {
        let zeros = |sizes| Tensor::<2>::zeros(sizes, &device);
        let bias = Tensor::<1>::zeros([6], &device);
        assert_snapshot!(
            message(|| drop(linear(zeros([2, 3]), zeros([3, 5]), Some(bias)))),
            @"linear: x is [2, 3], the weight [3, 5], the bias [6]: expected [rows, in], [in, out] and [out]"
        );
        assert_snapshot!(
            message(|| drop(linear(zeros([2, 3]), zeros([4, 5]), None))),
            @"linear: x is [2, 3], the weight [4, 5], the bias none: expected [rows, in], [in, out] and \
              [out]"
        );
        assert_snapshot!(
            message(|| drop(linear(zeros([2, 3]), zeros([3, 5]).cast(DType::F16), None))),
            @"linear: invalid type of the weight = F16 with x in F32: expected the type of x"
        );
        let call =
            |x, gradient, into| message(|| drop(accumulate_weight_gradient(x, gradient, into)));
        assert_snapshot!(
            call(zeros([2, 3]), zeros([4, 5]), zeros([3, 5])),
            @"accumulate_weight_gradient: x is [2, 3], the gradient [4, 5], the accumulator \
              [3, 5]: expected [rows, in], [rows, out] and [in, out]"
        );
        let half = |sizes| zeros(sizes).cast(DType::F16);
        assert_snapshot!(
            call(half([2, 3]), half([2, 5]), half([3, 5])),
            @"accumulate_weight_gradient: invalid type of the accumulator = F16 with x in F16: expected F32, or F64 \
              for F64"
        );
    });
}

#[test]
fn every_device_names_its_engine() {
    assert_snapshot!(engine_of(&Device::flex()), @"the gemm crate");
    assert_snapshot!(engine_of(&Device::flex().autodiff()), @"the gemm crate");
    #[cfg(feature = "wgpu")]
    assert_snapshot!(
        engine_of(&Device::wgpu(Default::default())),
        @"Burn's matmul: cuBLASLt is for CUDA devices, with the feature `cuda`"
    );
}

/// On the CPU, a row has the same bits on its own and among other rows. This holds for weights in row-major and in
/// column-major order.
#[test]
fn a_row_does_not_depend_on_the_others() {
    let device = Device::flex();
    let bits = |x: Tensor<2>| -> Vec<u64> { doubles(x).into_iter().map(f64::to_bits).collect() };
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for depth in [1, 2, 3, 17, 64, 520, 1111] {
            for columns in [1, 2, 16, 33, 200] {
                let all = matrix([70, depth], 0.3, &device, dtype);
                let weight = matrix([depth, columns], 0.9, &device, dtype);
                let bias = row(columns, 0.5, &device, dtype);
                for weight in [weight.clone(), turned(weight)] {
                    for bias in [None, Some(bias.clone())] {
                        let product = |x| linear(x, weight.clone(), bias.clone());
                        let expected = bits(product(all.clone()));
                        for (first, rows) in [(0, 1), (5, 1), (3, 2), (9, 4), (50, 20)] {
                            let found = bits(product(all.clone().narrow(0, first, rows)));
                            let expected = &expected[first * columns..][..rows * columns];
                            let what = format!("{dtype:?}, {rows} x {depth} x {columns}");
                            assert_eq!(found, expected, "{what}");
                        }
                    }
                }
            }
        }
    }
}
