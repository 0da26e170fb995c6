//! On Burn's CPU backend.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, TensorData};

use super::super::Format;
use crate::cpu::{Element, for_float, slice, tensor};

pub(super) fn encode(format: Format, values: &FlexTensor) -> FlexTensor {
    let per_word = (32 / format.bits()) as usize;
    let word = |codes: &mut dyn Iterator<Item = u8>| {
        codes.enumerate().fold(0u32, |word, (at, code)| {
            word | u32::from(code) << (format.bits() * at as u32)
        })
    };
    let words: Vec<u32> = for_float!(values.dtype(), E => slice::<E>(values)
        .chunks(per_word)
        .map(|chunk| word(&mut chunk.iter().map(|value| format.encode(value.wide() as f32))))
        .collect());
    let count = words.len();
    FlexTensor::from_data(TensorData::new(words, [count]))
}

pub(super) fn decode(format: Format, count: usize, dtype: DType, codes: &FlexTensor) -> FlexTensor {
    let Some(words) = codes.as_slice::<u32>() else {
        unreachable!("codes are u32 side by side")
    };
    let per_word = (32 / format.bits()) as usize;
    let value = |at: usize| {
        let code = words[at / per_word] >> (format.bits() * (at % per_word) as u32);
        format.decode(code as u8)
    };
    fn of<E: Element>(count: usize, value: impl Fn(usize) -> f32) -> FlexTensor {
        let values: Vec<f64> = (0..count).map(|at| f64::from(value(at))).collect();
        let values: Vec<E> = values
            .into_iter()
            .map(|v| E::narrow(<E::Wide as crate::cpu::Real>::of(v)))
            .collect();
        tensor(values, [count])
    }
    for_float!(dtype, E => of::<E>(count, value))
}
