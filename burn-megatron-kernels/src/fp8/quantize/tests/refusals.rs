//! Tests that error messages are the same on every device.

use insta::{allow_duplicates, assert_snapshot};

use super::*;

pub(crate) fn message(work: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let panic = panic.expect_err("the call must fail");
    let text = panic.downcast_ref::<String>().cloned();
    text.expect("the panic has a message")
}

#[test]
fn what_does_not_fit_is_named() {
    allow_duplicates!(for (device, _) in devices() {
        let x = || Tensor::<2>::ones([4, 8], &device);
        let ones = |shape: [usize; 1], dtype| Tensor::<1>::ones(shape, (&device, dtype));
        let with = |format, scaling: Scaling| {
            message(|| drop(quantize(x(), format, &scaling, QuantizerUsage::BOTH)))
        };
        assert_snapshot!(
            with(Format::E2M1, Scaling::Mx),
            @"quantize: invalid format = E2M1: expected E4M3 or E5M2"
        );
        assert_snapshot!(
            with(Format::E4M3, Scaling::Tensor(ones([2], DType::F32))),
            @"quantize: the scale is [2]: expected [1]"
        );
        assert_snapshot!(
            with(Format::E4M3, Scaling::Tensor(ones([1], DType::F16))),
            @"quantize: invalid scale = F16: expected F32"
        );
        let scale = |amax, format, epsilon| {
            let options = CurrentScale {
                epsilon,
                power_of_two: false,
            };
            message(|| drop(current_scale(amax, format, options)))
        };
        let one = || ones([1], DType::F32);
        assert_snapshot!(
            scale(ones([3], DType::F32), Format::E4M3, 0.0),
            @"current_scale: the largest magnitude is [3]: expected [1]"
        );
        assert_snapshot!(
            scale(one(), Format::E2M1, 0.0),
            @"current_scale: invalid format = E2M1: expected E4M3 or E5M2"
        );
        for epsilon in [-1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(
                scale(one(), Format::E4M3, epsilon),
                format!(
                    "current_scale: invalid epsilon = {epsilon}: expected a finite number that is 0 \
                     or more"
                )
            );
        }
    });
}

#[test]
fn codes_and_scales_that_do_not_belong_together_are_refused() {
    allow_duplicates!(for (device, _) in devices() {
        let x = Tensor::<2>::ones([4, 40], &device);
        let copy = |scaling: &Scaling| {
            let quantized = quantize(x.clone(), Format::E4M3, scaling, QuantizerUsage::ROWWISE);
            quantized.rowwise.unwrap()
        };
        let refused = |matrix: Fp8Matrix| message(|| drop(dequantize(&matrix)));
        let mx = copy(&Scaling::Mx);
        assert_snapshot!(
            refused(Fp8Matrix {
                depth: 49,
                ..mx.clone()
            }),
            @"dequantize: the matrix is [4, 49] and its codes [4, 12]: expected [4, 16] (see Fp8Matrix)"
        );
        assert_snapshot!(
            refused(Fp8Matrix {
                scales: Scales::Tensor(Tensor::ones([4], &device)),
                ..mx.clone()
            }),
            @"dequantize: the matrix is [4, 40] and its scales [4]: expected [1] (see Fp8Matrix)"
        );
        let blocks = |height, scales| Fp8Matrix {
            scales: Scales::Blocks { scales, height },
            ..mx.clone()
        };
        assert_snapshot!(
            refused(blocks(64, Tensor::ones([1, 1], &device))),
            @"dequantize: invalid rows that share a scale = 64 of the matrix: expected 1 or 128"
        );
        assert_snapshot!(
            refused(blocks(1, Tensor::ones([1, 1], &device))),
            @"dequantize: the matrix is [4, 40] and its scales [1, 1]: expected [4, 1] (see Fp8Matrix)"
        );
        assert_snapshot!(
            refused(blocks(BLOCK, Tensor::ones([1, 1], (&device, DType::F16)))),
            @"dequantize: invalid type of the scales = F16: expected F32"
        );
    });
}

#[cfg(feature = "wgpu")]
#[test]
fn tensors_of_two_devices_are_refused() {
    let (flex, other) = (Device::flex(), Device::wgpu(Default::default()));
    let x = Tensor::<2>::ones([4, 8], &other);
    let scaling = Scaling::Tensor(Tensor::ones([1], &flex));
    let message = message(|| drop(quantize(x, Format::E4M3, &scaling, QuantizerUsage::BOTH)));
    assert!(message.contains("expected one device"), "{message}");
}
