//! Tests the encoding of single values on every device with kernels.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{e8m0_factors, e8m0_of_amax, encode_word};
use crate::cube::{empty, launch};
use crate::fp8::{Format, e8m0};
use crate::launch::{DeviceOp, Spec, launch_one};
use crate::testing::devices;

/// Computes four results per value: the code of a block scale, the two factors of its lowest 8 bits, and the word with
/// the codes of this value and the next three values.
#[cube(launch_unchecked)]
fn probe(values: &[f32], results: &mut [u32], count: u32) {
    let at = ABSOLUTE_POS;
    let count = count as usize;
    if at < count {
        results[at] = e8m0_of_amax(values[at]);
        let (first, second) = e8m0_factors(u32::reinterpret(values[at]) & 0xff);
        results[count + at] = u32::reinterpret(first);
        results[2 * count + at] = u32::reinterpret(second);
        let mut four = Vector::<f32, Const<4>>::empty();
        #[unroll]
        for lane in 0..4usize {
            four.insert(lane, values[(at + lane) % count]);
        }
        results[3 * count + at] = encode_word(four, 0usize, Format::E4M3);
    }
}

#[derive(Debug)]
struct Probe;

impl DeviceOp for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([4 * inputs[0].shape[0]], DType::U32)]
    }

    fn cpu(&self, _inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        unreachable!("only devices with kernels are asked")
    }

    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let values = inputs.remove(0);
        let client = values.client.clone();
        let count = values.meta.shape()[0];
        let results = empty(&values, [4 * count], DType::U32);
        unsafe {
            launch!(
                probe,
                [client, count.div_ceil(256), 256],
                [],
                [values, &results],
                (count as u32)
            );
        }
        vec![results]
    }
}

/// Returns values with all exponents and mantissas near rounding limits, and values with each code in the lowest 8
/// bits.
fn values() -> Vec<f32> {
    let near = [0, 1, 0x40_0000, 0x5f_ffff, 0x60_0000, 0x60_0001, 0x7f_ffff];
    let each = |high: u32| near.map(|mantissa| high << 23 | mantissa);
    let exponents = (0..512).flat_map(each);
    let codes = (0..256).map(|code| 0x3f80_0000 | code);
    exponents.chain(codes).map(f32::from_bits).collect()
}

#[test]
fn scales_and_words_are_those_of_the_cpu() {
    let values = values();
    let count = values.len();
    for (device, _) in devices()
        .into_iter()
        .filter(|(device, _)| *device != Device::flex())
    {
        let tensor = Tensor::<1>::from_data(TensorData::new(values.clone(), [count]), &device);
        let results = launch_one(Probe, vec![tensor.into_dispatch()]);
        let results = Tensor::<1, Int>::from_dispatch(results).into_data();
        let results: Vec<u32> = results.try_into_vec().expect("u32");
        for (at, value) in values.iter().enumerate() {
            let [scale, first, second, word] = [0, 1, 2, 3].map(|row| results[row * count + at]);
            let bits = value.to_bits();
            assert_eq!(scale, u32::from(e8m0::of_amax(*value)), "{bits:#010x}");
            let code = bits as u8;
            let factors = [first, second].map(f32::from_bits);
            if code == e8m0::NAN {
                assert!(factors.iter().all(|factor| factor.is_nan()));
            } else {
                assert!(factors.iter().all(|factor| factor.is_normal()));
                let product = factors.map(f64::from).iter().product::<f64>();
                assert_eq!(product, 2f64.powi(127 - i32::from(code)), "{code}");
            }
            let codes = [0, 1, 2, 3].map(|lane| Format::E4M3.encode(values[(at + lane) % count]));
            assert_eq!(word, u32::from_le_bytes(codes), "{bits:#010x}");
        }
    }
}
