//! Tests of the numerical results of FP8 matrix multiplications.

use super::*;
use crate::fp8::dequantize;

const E4M3: Format = Format::E4M3;
const E5M2: Format = Format::E5M2;

fn types(has: &[DType]) -> Vec<FloatDType> {
    has.iter().map(|dtype| FloatDType::from(*dtype)).collect()
}

/// Rounds values to `dtype`. f32 must be able to represent the values exactly.
fn rounded(values: Vec<f64>, dtype: FloatDType) -> Vec<f64> {
    let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
    let count = values.len();
    let data = TensorData::new(values, [count]).convert_dtype(dtype.into());
    data.convert_dtype(DType::F64).try_into_vec().unwrap()
}

fn draws(a: ScalesKind, b: ScalesKind, formats: [Format; 2], exact: bool) -> [TestValues; 2] {
    let draw = |kind, format, seed| TestValues {
        format,
        kind,
        exact,
        seed,
    };
    [draw(a, formats[0], 7), draw(b, formats[1], 1234)]
}

#[test]
fn sums_that_f32_holds_are_exact_and_rounded_once() {
    for (device, has) in devices() {
        for [a, b] in ScalesKind::ALL
            .map(|a| ScalesKind::ALL.map(|b| [a, b]))
            .concat()
        {
            for [m, n, depth] in SIZES {
                let [of_a, of_b] = draws(a, b, [E4M3, E5M2], true);
                let (a, b) = (
                    of_a.matrix(m, depth, &device),
                    of_b.matrix(n, depth, &device),
                );
                let (sums, _) = product(&a, &b);
                for dtype in types(&has) {
                    let exact =
                        |bias| multiply(&a.matrix, &b.matrix, bias, dtype, Accumulation::Exact);
                    let what =
                        format!("{of_a:?} {of_b:?} [{m}, {n}, {depth}] {dtype:?} {device:?}");
                    let y = exact(None);
                    assert_eq!(y.dims(), [m, n]);
                    assert_eq!(y.dtype(), dtype.into());
                    assert_eq!(doubles(y), rounded(sums.clone(), dtype), "{what}");
                    // The bias contains halves that 16-bit types cannot represent at the magnitude of the sums.
                    let bias: Vec<f32> = (0..n).map(|i| 513.0 + i as f32 / 2.0).collect();
                    let epilogue = |at: usize| sums[at] + f64::from(bias[at % n]);
                    let expected: Vec<f64> = (0..m * n).map(epilogue).collect();
                    let bias = TensorData::new(bias.clone(), [n]);
                    let y = exact(Some(Tensor::from_data(bias, (&device, DType::F32))));
                    assert_eq!(doubles(y), rounded(expected, dtype), "{what}, bias");
                }
            }
        }
    }
}

#[test]
fn every_kind_and_format_is_near_to_f64() {
    for (device, _) in devices() {
        for [a, b] in ScalesKind::ALL
            .map(|a| ScalesKind::ALL.map(|b| [a, b]))
            .concat()
        {
            for formats in [[E4M3; 2], [E4M3, E5M2], [E5M2, E4M3], [E5M2; 2]] {
                for [m, n, depth] in [[33, 17, 130], [48, 32, 320]] {
                    let [of_a, of_b] = draws(a, b, formats, false);
                    let (a, b) = (
                        of_a.matrix(m, depth, &device),
                        of_b.matrix(n, depth, &device),
                    );
                    let (sums, bounds) = product(&a, &b);
                    let library = engine_of_fp8(&device).starts_with("cuBLASLt");
                    for accumulation in [Accumulation::Exact, Accumulation::Fast] {
                        let unit = match (accumulation, library) {
                            // The precision of the accumulators in Hopper's tensor cores.
                            (Accumulation::Fast, true) => 2f64.powi(-14),
                            _ => f64::from(f32::EPSILON) / 2.0,
                        };
                        let dtype = FloatDType::F32;
                        let y = doubles(multiply(&a.matrix, &b.matrix, None, dtype, accumulation));
                        for (i, (y, (sum, bound))) in
                            y.iter().zip(sums.iter().zip(&bounds)).enumerate()
                        {
                            // Each operand is rounded once, and each product and each sum is rounded once.
                            let error = (depth as f64 + 3.0) * unit * bound;
                            assert!(
                                (y - sum).abs() <= error,
                                "{of_a:?} {of_b:?} {accumulation:?} on {device:?}: element {i} is \
                                 {y} and should be {sum}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// If the result is f64, the sums are computed in f64, in any order.
#[test]
fn a_result_in_f64_is_summed_in_f64() {
    let device = Device::flex();
    for [a, b] in ScalesKind::ALL
        .map(|a| ScalesKind::ALL.map(|b| [a, b]))
        .concat()
    {
        let [of_a, of_b] = draws(a, b, [E4M3, E5M2], false);
        let [m, n, depth] = [9, 7, 70];
        let (a, b) = (
            of_a.matrix(m, depth, &device),
            of_b.matrix(n, depth, &device),
        );
        let values = |of: &Fp8Matrix| doubles(dequantize(of));
        let (x, y) = (values(&a.matrix), values(&b.matrix));
        let bias: Vec<f64> = (0..n).map(|i| 1.0 / (3.0 + i as f64)).collect();
        let flat = Tensor::<1>::zeros([m * n], (&device, DType::F64));
        let sums = doubles(accumulate_at(&a.matrix, &b.matrix, flat, 0, false));
        let epilogue = Tensor::from_data(TensorData::new(bias.clone(), [n]), (&device, DType::F64));
        let dtype = FloatDType::F64;
        let result = multiply(
            &a.matrix,
            &b.matrix,
            Some(epilogue),
            dtype,
            Accumulation::Exact,
        );
        for (at, (result, sum)) in doubles(result).into_iter().zip(sums).enumerate() {
            let (row, column) = (at / n, at % n);
            let terms = (0..depth).map(|k| x[row * depth + k] * y[column * depth + k]);
            let (expected, size) = terms.fold((0.0, 0.0), |(sum, size): (f64, f64), term| {
                (sum + term, size + term.abs())
            });
            let bound = (depth as f64 + 2.0) * f64::EPSILON * (size + 1.0);
            assert!((sum - expected).abs() <= bound, "{of_a:?} {of_b:?} {at}");
            let expected = expected + bias[column];
            assert!((result - expected).abs() <= bound, "{of_a:?} {of_b:?} {at}");
        }
    }
}

#[test]
fn any_size_may_be_zero() {
    for (device, _) in devices() {
        for kind in ScalesKind::ALL {
            for [m, n, depth] in [[0, 3, 5], [3, 0, 5], [2, 3, 0], [0, 0, 0]] {
                let [of_a, of_b] = draws(kind, kind, [E4M3; 2], true);
                let (a, b) = (
                    of_a.matrix(m, depth, &device).matrix,
                    of_b.matrix(n, depth, &device).matrix,
                );
                let call = |bias| multiply(&a, &b, bias, FloatDType::F32, Accumulation::Fast);
                assert_eq!(call(None).dims(), [m, n], "{kind:?}");
                assert_eq!(doubles(call(None)), vec![0.0; m * n], "{kind:?}");
                let bias = Tensor::ones([n], &device);
                assert_eq!(doubles(call(Some(bias))), vec![1.0; m * n], "{kind:?}");
            }
        }
    }
}

#[test]
fn every_device_names_its_engine() {
    let flex = Device::flex();
    let decoded = "decoded to f32 and multiplied by the gemm crate";
    assert_eq!(engine_of_fp8(&flex), decoded);
    assert_eq!(engine_of_fp8(&flex.autodiff()), decoded);
    #[cfg(feature = "wgpu")]
    insta::assert_snapshot!(
        engine_of_fp8(&Device::wgpu(Default::default())),
        @"decoded to f32 and multiplied by Burn's matmul: cuBLASLt is for CUDA devices, with the \
          feature `cuda`"
    );
}
