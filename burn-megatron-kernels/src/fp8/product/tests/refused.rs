//! What products refuse, and in which words.

use super::*;

fn message(work: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let panic = panic.expect_err("the call must be refused");
    let text = panic.downcast_ref::<String>().cloned();
    text.expect("the panic has a message")
}

fn matrix(kind: Kind, rows: usize, depth: usize, device: &Device) -> Fp8Matrix {
    let draw = Draw {
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
    for (device, _) in devices() {
        let a = matrix(Kind::Mx, 3, 40, &device);
        let b = matrix(Kind::Mx, 4, 41, &device);
        let f32 = FloatDType::F32;
        assert_eq!(
            refused(&a, &b, None, f32),
            "fp8::multiply: a is [3, 40] and b [4, 41]; [m, depth] and [n, depth] fit"
        );
        let b = matrix(Kind::Tensor, 4, 40, &device);
        let bias = Tensor::zeros([3], &device);
        assert_eq!(
            refused(&a, &b, Some(bias), f32),
            "fp8::multiply: the bias is [3] beside b of 4 rows; [4] fits"
        );
        let flat = |len, dtype| Tensor::<1>::zeros([len], &device).cast(dtype);
        assert_eq!(
            message(|| drop(accumulate_at(&a, &b, flat(13, f32), 2, true))),
            "fp8::accumulate_at: 12 elements from element 2 on reach past a flat buffer of 13; \
             one of at least 14 is needed"
        );
        assert_eq!(
            message(|| drop(accumulate_at(&a, &b, flat(14, FloatDType::F16), 2, true))),
            "fp8::accumulate_at: type of the flat buffer = F16 makes no sense; F32 or F64 does"
        );
    }
}

#[test]
fn matrices_whose_parts_do_not_belong_together() {
    for (device, _) in devices() {
        let good = matrix(Kind::Tensor, 3, 40, &device);
        let refused = |bad: Fp8Matrix| {
            let first = refused(&bad, &good, None, FloatDType::F32);
            let flat = Tensor::zeros([9], &device);
            let second = message(|| drop(accumulate_at(&good, &bad, flat, 0, false)));
            let swapped = first.replace("fp8::multiply: a is", "fp8::accumulate_at: b is");
            let swapped = swapped.replace("fp8::multiply", "fp8::accumulate_at");
            assert_eq!(second, swapped.replace("of a ", "of b "));
            first
        };
        let codes = matrix(Kind::Tensor, 3, 50, &device).codes;
        assert_eq!(
            refused(Fp8Matrix {
                codes,
                ..good.clone()
            }),
            "fp8::multiply: a is [3, 40] and its codes [3, 16]; [3, 12] fit (see Fp8Matrix)"
        );
        let with = |scales| Fp8Matrix {
            scales,
            ..good.clone()
        };
        assert_eq!(
            refused(with(matrix(Kind::Mx, 3, 129, &device).scales)),
            "fp8::multiply: a is [3, 40] and its scales [3, 2]; [3, 1] fit (see Fp8Matrix)"
        );
        assert_eq!(
            refused(with(matrix(Kind::Squares, 129, 40, &device).scales)),
            "fp8::multiply: a is [3, 40] and its scales [2, 1]; [1, 1] fit (see Fp8Matrix)"
        );
        assert_eq!(
            refused(with(Scales::Tensor(Tensor::zeros([2], &device)))),
            "fp8::multiply: a is [3, 40] and its scales [2]; [1] fit (see Fp8Matrix)"
        );
        let scales = Tensor::zeros([1, 1], &device);
        assert_eq!(
            refused(with(Scales::Blocks { scales, height: 64 })),
            "fp8::multiply: rows that share a scale = 64 of a makes no sense; 1 or 128 does"
        );
        assert_eq!(
            refused(Fp8Matrix {
                format: Format::E2M1,
                ..good.clone()
            }),
            "fp8::multiply: format = E2M1 of a makes no sense; E4M3 or E5M2 does"
        );
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn what_the_device_has_not() {
    let device = Device::wgpu(Default::default());
    let here = matrix(Kind::Tensor, 3, 40, &device);
    let there = matrix(Kind::Tensor, 3, 40, &Device::flex());
    let text = refused(&here, &there, None, FloatDType::F32);
    assert!(text.starts_with("fp8::multiply: device of b = "), "{text}");
    let text = refused(&here, &here, None, FloatDType::F64);
    assert!(
        text.starts_with("fp8::multiply does not take F64 on "),
        "{text}"
    );
}
