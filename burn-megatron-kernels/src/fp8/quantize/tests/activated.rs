//! Tests that a fused activation and quantization has the same bits as the two separate operations.

use super::*;
use crate::activation::{Activation, ActivationOptions, activate};
use crate::fp8::{empty_log, quantize_logged};

const ACTIVATIONS: [Activation; 7] = [
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::QuickGelu,
    Activation::SquaredRelu,
    Activation::SwiGlu,
    Activation::GeGlu,
    Activation::QuickGeGlu,
];

fn check(device: &Device, case: &Case, kind: ScalingKind, activation: Activation, biased: bool) {
    let [rows, width] = case.sizes;
    let (x, dtype) = (case.tensor(device), case.dtype);
    let bias = biased.then(|| {
        let values: Vec<f32> = (0..width).map(|at| (at % 7) as f32 * 0.25 - 0.7).collect();
        Tensor::<1>::from_data(TensorData::new(values, [width]), (device, dtype))
    });
    let options = ActivationOptions::default();
    let values = activate(x.clone(), bias.clone(), None, activation, options);
    let input = QuantizerInput::activated(x, bias, activation);
    assert_eq!(input.dims(), values.dims());
    let scaling = scaling(kind, 0.7, device);
    let quantized = |input: QuantizerInput| {
        let usage = QuantizerUsage::BOTH;
        let log = empty_log(1, device);
        let quantized = quantize_logged(input, Format::E4M3, &scaling, usage, log, 0);
        let copies = [quantized.rowwise, quantized.columnwise];
        let seen: Vec<u32> = floats(&quantized.seen).into_iter().map(bits).collect();
        (copies.map(|copy| parts(&copy.unwrap())), seen)
    };
    let what = format!(
        "{activation:?} of [{rows}, {width}] in {dtype:?}, with a bias: {biased}, by {kind:?} on {device:?}"
    );
    let (found, expected) = (quantized(input), quantized(values.into()));
    assert_words(&format!("{what}: seen"), &expected.1, &found.1);
    for (found, expected) in found.0.iter().zip(&expected.0) {
        assert_words(&format!("{what}: scales"), &expected.scales, &found.scales);
        let [expected, found] = [expected, found].map(|copy| codes(copy, device));
        assert_words(&format!("{what}: codes"), &expected, &found);
    }
}

/// Returns the codes of a copy. On WebGPU devices, a code of -0 becomes 0, because WGSL may ignore the signs of zeros
/// ("Floating point evaluation").
fn codes(copy: &Copy, device: &Device) -> Vec<u32> {
    if cfg!(not(feature = "wgpu")) || *device == Device::flex() {
        return copy.codes.clone();
    }
    let unsigned = |code| if code == 0x80 { 0 } else { code };
    let words = copy.codes.iter();
    words
        .map(|word| u32::from_le_bytes(word.to_le_bytes().map(unsigned)))
        .collect()
}

#[test]
fn the_bits_are_those_of_the_activation_and_the_quantiser() {
    for (device, has) in devices() {
        for (k, kind) in KINDS.into_iter().enumerate() {
            for (i, activation) in ACTIVATIONS.into_iter().enumerate() {
                let turn = k + i;
                let sizes = [[160, 528], [131, 70], [70, 260], [1, 2]][turn % 4];
                let dtype = has[turn % has.len()];
                let case = match turn % 3 {
                    0 => Case::extreme(sizes, dtype),
                    _ => Case::ordinary(sizes, dtype),
                };
                check(&device, &case, kind, activation, turn % 2 == 0);
            }
        }
    }
    // The cases are a matrix without rows, and a type for which there are no kernels.
    let device = Device::flex();
    check(
        &device,
        &Case::ordinary([0, 6], DType::F32),
        ScalingKind::Mx,
        Activation::SwiGlu,
        true,
    );
    check(
        &device,
        &Case::ordinary([33, 6], DType::F64),
        ScalingKind::Mx,
        Activation::Gelu,
        true,
    );
}

#[test]
fn what_the_activation_refuses_is_refused() {
    let x = || Tensor::<2>::ones([2, 3], &Device::flex());
    let refused = message(|| drop(QuantizerInput::activated(x(), None, Activation::SwiGlu)));
    assert!(refused.contains("an odd width of 3"), "{refused}");
    let bias = Tensor::<1>::ones([4], &Device::flex());
    let refused = message(|| drop(QuantizerInput::activated(x(), Some(bias), Activation::Gelu)));
    assert!(
        refused.contains("a bias [4] for x [2, 3]: expected [3]"),
        "{refused}"
    );
}
