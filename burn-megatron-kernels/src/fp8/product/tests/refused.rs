//! Tests the error messages of FP8 matrix multiplications.

use insta::{allow_duplicates, assert_snapshot};

use super::*;

fn message(work: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let panic = panic.expect_err("the call must fail");
    let text = panic.downcast_ref::<String>().cloned();
    text.expect("the panic has a message")
}

fn matrix(kind: ScalesKind, rows: usize, depth: usize, device: &Device) -> Fp8Matrix {
    let draw = TestValues {
        format: Format::E4M3,
        kind,
        exact: true,
        seed: 9,
    };
    draw.matrix(rows, depth, device).matrix
}

fn refused(a: &Fp8Matrix, b: &Fp8Matrix, bias: Option<Tensor<1>>, dtype: FloatDType) -> String {
    message(|| drop(multiply(a, b, bias, dtype, Accumulation::Exact)))
}

#[test]
fn sizes_that_do_not_agree() {
    allow_duplicates!(for (device, _) in devices() {
        let a = matrix(ScalesKind::Mx, 3, 40, &device);
        let b = matrix(ScalesKind::Mx, 4, 41, &device);
        let f32 = FloatDType::F32;
        assert_snapshot!(
            refused(&a, &b, None, f32),
            @"fp8::multiply: a is [3, 40] and b [4, 41]: expected [m, depth] and [n, depth]"
        );
        let b = matrix(ScalesKind::Tensor, 4, 40, &device);
        let bias = Tensor::zeros([3], &device);
        assert_snapshot!(
            refused(&a, &b, Some(bias), f32),
            @"fp8::multiply: a bias [3] for b with 4 rows: expected [4]"
        );
        let flat = |len, dtype| Tensor::<1>::zeros([len], &device).cast(dtype);
        assert_snapshot!(
            message(|| drop(accumulate_at(&a, &b, flat(13, f32), 2, true))),
            @"fp8::accumulate_at: 12 elements from element 2 on reach past a flat buffer of 13: expected at least 14"
        );
        assert_snapshot!(
            message(|| drop(accumulate_at(&a, &b, flat(14, FloatDType::F16), 2, true))),
            @"fp8::accumulate_at: invalid type of the flat buffer = F16: expected F32 or F64"
        );
    });
}

#[test]
fn matrices_whose_parts_do_not_belong_together() {
    allow_duplicates!(for (device, _) in devices() {
        let good = matrix(ScalesKind::Tensor, 3, 40, &device);
        let refused = |bad: Fp8Matrix| {
            let first = refused(&bad, &good, None, FloatDType::F32);
            let flat = Tensor::zeros([9], &device);
            let second = message(|| drop(accumulate_at(&good, &bad, flat, 0, false)));
            let swapped = first.replace("fp8::multiply: a is", "fp8::accumulate_at: b is");
            let swapped = swapped.replace("fp8::multiply", "fp8::accumulate_at");
            assert_eq!(second, swapped.replace("of a:", "of b:"));
            first
        };
        let codes = matrix(ScalesKind::Tensor, 3, 50, &device).codes;
        assert_snapshot!(
            refused(Fp8Matrix {
                codes,
                ..good.clone()
            }),
            @"fp8::multiply: a is [3, 40] and its codes [3, 16]: expected [3, 12] (see Fp8Matrix)"
        );
        let with = |scales| Fp8Matrix {
            scales,
            ..good.clone()
        };
        assert_snapshot!(
            refused(with(matrix(ScalesKind::Mx, 3, 129, &device).scales)),
            @"fp8::multiply: a is [3, 40] and its scales [3, 2]: expected [3, 1] (see Fp8Matrix)"
        );
        assert_snapshot!(
            refused(with(matrix(ScalesKind::Squares, 129, 40, &device).scales)),
            @"fp8::multiply: a is [3, 40] and its scales [2, 1]: expected [1, 1] (see Fp8Matrix)"
        );
        assert_snapshot!(
            refused(with(Scales::Tensor(Tensor::zeros([2], &device)))),
            @"fp8::multiply: a is [3, 40] and its scales [2]: expected [1] (see Fp8Matrix)"
        );
        let scales = Tensor::zeros([1, 1], &device);
        assert_snapshot!(
            refused(with(Scales::Blocks { scales, height: 64 })),
            @"fp8::multiply: invalid rows that share a scale = 64 of a: expected 1 or 128"
        );
        assert_snapshot!(
            refused(Fp8Matrix {
                format: Format::E2M1,
                ..good.clone()
            }),
            @"fp8::multiply: invalid format = E2M1 of a: expected E4M3 or E5M2"
        );
    });
}

#[cfg(feature = "wgpu")]
#[test]
fn what_the_device_has_not() {
    let device = Device::wgpu(Default::default());
    let here = matrix(ScalesKind::Tensor, 3, 40, &device);
    let there = matrix(ScalesKind::Tensor, 3, 40, &Device::flex());
    let text = refused(&here, &there, None, FloatDType::F32);
    assert!(
        text.starts_with("fp8::multiply: invalid device of b = "),
        "{text}"
    );
    let text = refused(&here, &here, None, FloatDType::F64);
    assert!(
        text.starts_with("fp8::multiply does not support F64 on "),
        "{text}"
    );
}
