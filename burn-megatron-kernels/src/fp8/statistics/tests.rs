use burn::tensor::{Device, Tensor};

use super::*;
use crate::fp8::quantize::tests::message;
use crate::fp8::{QuantizerUsage, Scaling, quantize};
use crate::testing::devices;

fn of(values: [[f32; 4]; 2], scaling: &Scaling, device: &Device) -> Statistics {
    let x = Tensor::<2>::from_floats(values, device);
    let both = quantize(x.clone(), Format::E4M3, scaling, QuantizerUsage::BOTH);
    let rowwise = statistics(x.clone(), &both.rowwise.unwrap());
    let columnwise = statistics(x.transpose(), &both.columnwise.unwrap());
    if !matches!(scaling, Scaling::Mx) {
        let shares = |found: Statistics| (found.amax, found.saturated, found.flushed);
        assert_eq!(
            format!("{:?}", shares(rowwise)),
            format!("{:?}", shares(columnwise))
        );
        assert_eq!(
            format!("{:.4}", rowwise.snr),
            format!("{:.4}", columnwise.snr)
        );
    }
    rowwise
}

#[test]
fn shares_and_noise_are_counted() {
    for (device, _) in devices() {
        let one = Scaling::Tensor(Tensor::from_floats([2.0], &device));
        // Multiplied by 2, 224 becomes 448, which does not saturate. 225 becomes 450, which saturates. `tiny` becomes
        // 2^-10, half of the smallest value, and is flushed to 0.
        let tiny = 2f32.powi(-11);
        let found = of(
            [[224.0, -225.0, 0.0, 17.0], [tiny, -tiny, 3.0 * tiny, 1.0]],
            &one,
            &device,
        );
        assert_eq!(found.amax, 225.0);
        assert_eq!(found.saturated, 1.0 / 8.0);
        assert_eq!(found.flushed, 2.0 / 7.0);
        // 225 becomes 224. 17 * 2 = 34 is a tie and becomes 32. The other errors are far smaller.
        let signal = 224f64.powi(2) + 225f64.powi(2) + 17f64.powi(2) + 1.0;
        let snr = 10.0 * (signal / (1.0 + 1.0)).log10();
        assert!((found.snr - snr).abs() < 1e-3, "{} for {snr}", found.snr);
    }
}

#[test]
fn what_is_exact_has_no_noise() {
    for (device, _) in devices() {
        for scaling in [
            Scaling::Mx,
            Scaling::Tensor(Tensor::from_floats([0.5], &device)),
        ] {
            let exact = of(
                [[1.0, -2.0, 0.0, 448.0], [8.0, 40.0, -0.0, 2.0]],
                &scaling,
                &device,
            );
            assert_eq!((exact.amax, exact.snr), (448.0, f64::INFINITY));
            assert_eq!((exact.saturated, exact.flushed), (0.0, 0.0));
            let zeros = of([[0.0; 4]; 2], &scaling, &device);
            assert_eq!((zeros.amax, zeros.snr), (0.0, f64::INFINITY));
        }
    }
}

#[test]
fn large_and_invalid_values_do_not_hide() {
    for (device, _) in devices() {
        let huge = of([[1e38, -3e38, 2e38, 1e37], [1.0; 4]], &Scaling::Mx, &device);
        assert!((20.0..50.0).contains(&huge.snr), "{huge:?}");
        for bad in [f32::NAN, f32::INFINITY] {
            let one = Scaling::Tensor(Tensor::ones([1], &device));
            let found = of([[1.0, 2.0, bad, 4.0], [1.0; 4]], &one, &device);
            assert!(found.snr.is_nan(), "{found:?}");
            assert_eq!(found.amax.is_nan(), bad.is_nan());
            assert_eq!(found.saturated, if bad.is_nan() { 0.0 } else { 0.125 });
        }
    }
}

#[test]
fn an_empty_matrix_is_exact_and_other_sizes_are_refused() {
    insta::allow_duplicates!(for (device, _) in devices() {
        let x = |sizes: [usize; 2]| Tensor::<2>::zeros(sizes, &device);
        let copy = |sizes| {
            let both = quantize(
                x(sizes),
                Format::E4M3,
                &Scaling::Mx,
                QuantizerUsage::ROWWISE,
            );
            both.rowwise.unwrap()
        };
        let empty = statistics(x([0, 5]), &copy([0, 5]));
        assert_eq!((empty.amax, empty.snr), (0.0, f64::INFINITY));
        insta::assert_snapshot!(
            message(|| _ = statistics(x([5, 3]), &copy([3, 5]))),
            @"statistics: x is [5, 3] and its copy [3, 5]: expected the same size"
        );
    });
}
