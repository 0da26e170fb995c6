//! Tests the accuracy of the kinds of scaling.

use super::*;
use crate::fp8::statistics;

/// Returns independent values from a normal distribution.
fn normal(sizes: [usize; 2]) -> Case {
    Case::new(sizes, DType::F32, |at| {
        let uniform = |at| (f64::from(noise(at)) + 0.5) / 2f64.powi(32);
        let radius = (-2.0 * uniform(2 * at).ln()).sqrt();
        (radius * (std::f64::consts::TAU * uniform(2 * at + 1)).cos()) as f32
    })
}

#[test]
fn normal_values_keep_the_precision_of_the_format() {
    for (device, _) in devices() {
        let case = normal([256, 384]);
        let x = case.tensor(&device);
        for (format, bounds) in [(Format::E4M3, 30.5..33.0), (Format::E5M2, 24.5..27.0)] {
            let current = current_scale(amax(x.clone()), format, CurrentScale::default());
            for kind in KINDS {
                let scaling = match kind {
                    ScalingKind::Tensor => Scaling::Tensor(current.clone()),
                    kind => scaling(kind, 1.0, &device),
                };
                let quantized = quantize(x.clone(), format, &scaling, QuantizerUsage::BOTH);
                let copies = [
                    (x.clone(), quantized.rowwise),
                    (x.clone().transpose(), quantized.columnwise),
                ];
                for (x, copy) in copies {
                    let found = statistics(x, &copy.unwrap());
                    assert!(
                        bounds.contains(&found.snr),
                        "{format:?} {kind:?}: {found:?}"
                    );
                    assert_eq!(found.saturated, 0.0, "{format:?} {kind:?}");
                    assert!(found.flushed < 0.003, "{format:?} {kind:?}: {found:?}");
                }
            }
        }
    }
}

#[test]
fn small_blocks_save_what_one_scale_loses() {
    let device = Device::flex();
    // The rows have very different magnitudes.
    let noise = normal([128, 128]);
    let x = Case::new([128, 128], DType::F32, |at| {
        noise.values[at] * 10f32.powi((at / 128) as i32 % 12 - 6)
    });
    let x = x.tensor(&device);
    let flushed = |scaling: &Scaling| {
        let copy = quantize(x.clone(), Format::E4M3, scaling, QuantizerUsage::ROWWISE).rowwise;
        statistics(x.clone(), &copy.unwrap()).flushed
    };
    let scale = current_scale(amax(x.clone()), Format::E4M3, CurrentScale::default());
    let one = flushed(&Scaling::Tensor(scale));
    assert!(one > 0.4, "{one}");
    for scaling in [scaling(blocks(false, true), 1.0, &device), Scaling::Mx] {
        let many = flushed(&scaling);
        assert!(many < 0.003, "{many} by {scaling:?}");
    }
}

#[test]
fn copies_are_each_others_transposed_where_blocks_are_square_and_only_there() {
    for (device, _) in devices() {
        let case = Case::ordinary([160, 200], DType::F32);
        for kind in KINDS {
            let scaling = scaling(kind, 5.0, &device);
            let quantized = quantize(
                case.tensor(&device),
                Format::E4M3,
                &scaling,
                QuantizerUsage::BOTH,
            );
            let values = |copy: Option<Fp8Matrix>| dequantize(&copy.unwrap());
            let rowwise = values(quantized.rowwise).transpose();
            let same = floats(&rowwise) == floats(&values(quantized.columnwise));
            assert_eq!(same, kind.shares_codes(), "{kind:?}");
        }
    }
}
