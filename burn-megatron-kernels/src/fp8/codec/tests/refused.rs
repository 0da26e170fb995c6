//! Tests that error messages are the same on every device.

use insta::assert_snapshot;

use super::*;

fn message(work: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let panic = panic.expect_err("the call must fail");
    let text = panic.downcast_ref::<String>().cloned();
    text.expect("the panic has a message")
}

#[test]
fn more_values_than_there_are_codes() {
    insta::allow_duplicates!(for (device, _) in devices() {
        let codes = || integers(vec![0; 2], &device);
        let take =
            |count, format| message(|| drop(decode(codes(), count, format, FloatDType::F32)));
        assert_snapshot!(
            take(9, Format::E4M3),
            @"fp8::decode: 9 values do not fit the 8 codes of 2 words"
        );
        assert_snapshot!(
            take(17, Format::E2M1),
            @"fp8::decode: 17 values do not fit the 16 codes of 2 words"
        );
        assert_eq!(
            message(|| drop(decode_scales(codes(), usize::MAX))),
            format!(
                "fp8::decode_scales: {} values do not fit the 8 codes of 2 words",
                usize::MAX
            )
        );
    });
}

#[test]
fn codes_that_are_not_u32() {
    for (device, _) in devices() {
        let codes = Tensor::<1, Int>::zeros([2], (&device, DType::I32));
        let text = message(|| drop(decode(codes, 1, Format::E4M3, FloatDType::F32)));
        let expected = "fp8::decode does not support I32 on ";
        assert!(
            text.starts_with(expected) && text.ends_with(": expected U32"),
            "{text}"
        );
    }
}

#[test]
#[cfg(feature = "wgpu")]
fn types_that_the_device_lacks() {
    let device = Device::wgpu(Default::default());
    if device.supports_dtype(DType::BF16) {
        return;
    }
    let codes = integers(vec![0; 2], &device);
    let text = message(|| drop(decode(codes, 1, Format::E4M3, FloatDType::BF16)));
    assert!(
        text.starts_with("fp8::decode does not support BF16 on "),
        "{text}"
    );
}
