//! From codes back to values.

use burn::backend::flex::FlexTensor;
use rayon::prelude::*;

use super::super::super::matrix::{mx_words, words, words_of};
use super::super::launched::{Dequantize, Kind};
use crate::cpu::{rows_per_task, slice, tensor, vectorized};
use crate::fp8::{BLOCK, MX_BLOCK, e8m0};

/// See [`Dequantize`].
pub(in super::super) fn dequantize(kernel: &Dequantize, inputs: &[FlexTensor]) -> FlexTensor {
    let (codes, depth) = (&inputs[0], kernel.depth);
    let rows = codes.layout().shape()[0];
    let codes = words_of(codes);
    let table: Vec<f32> = (0..=255).map(|code| kernel.format.decode(code)).collect();
    let width = match kernel.kind {
        Kind::Tensor => depth,
        Kind::Blocks { .. } => BLOCK,
        Kind::Mx => MX_BLOCK,
    };
    let scale = scales(kernel, &inputs[1]);
    let mut values = vec![0f32; rows * depth];
    let row = |(row, values): (usize, &mut [f32])| {
        let codes = &codes[row * words(depth)..];
        for (block, values) in values.chunks_mut(width).enumerate() {
            let scale = scale(row, block);
            let codes = &codes[block * width / 4..];
            for (values, word) in values.chunks_mut(4).zip(codes) {
                let codes = values.iter_mut().zip(word.to_le_bytes());
                codes.for_each(|(value, code)| *value = table[usize::from(code)] * scale);
            }
        }
    };
    let band = rows_per_task(depth);
    let of_band = |(number, values): (usize, &mut [f32])| {
        let lines = values.chunks_mut(depth).enumerate();
        let lines = lines.map(|(at, values)| (number * band + at, values));
        vectorized(
            #[inline(always)]
            || lines.for_each(row),
        );
    };
    match rows <= band {
        true if values.is_empty() => {}
        true => of_band((0, &mut values)),
        false => {
            let bands = values.par_chunks_mut((band * depth).max(1));
            bands.enumerate().for_each(of_band);
        }
    }
    tensor(values, [rows, depth])
}

/// The scale of a row and a block of it.
fn scales<'a>(
    kernel: &Dequantize,
    scales: &'a FlexTensor,
) -> Box<dyn Fn(usize, usize) -> f32 + Sync + 'a> {
    let (kind, depth) = (kernel.kind, kernel.depth);
    match kind {
        Kind::Tensor => {
            let scale = slice::<f32>(scales)[0];
            Box::new(move |_, _| scale)
        }
        Kind::Blocks { .. } => {
            let scales = slice::<f32>(scales);
            Box::new(move |row, block| scales[row / kind.height() * depth.div_ceil(BLOCK) + block])
        }
        Kind::Mx => {
            let scales = words_of(scales);
            Box::new(move |row, block| {
                let word = scales[row * mx_words(depth) + block / 4];
                e8m0::decode((word >> (8 * (block % 4))) as u8)
            })
        }
    }
}
