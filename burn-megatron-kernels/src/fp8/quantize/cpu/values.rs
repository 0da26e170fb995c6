//! Converts codes to values.

use burn::backend::flex::FlexTensor;

use super::super::super::matrix::{mx_words, words};
use super::super::scaling::ScalingKind;
use crate::cpu::{for_rows, slice, tensor};
use crate::fp8::format::{Format, e8m0};
use crate::fp8::matrix::{BLOCK, MX_BLOCK};

/// Computes the values. See [`dequantize`](super::super::dequantize).
pub(in super::super) fn dequantize(
    inputs: &[FlexTensor],
    format: Format,
    kind: ScalingKind,
    depth: usize,
) -> FlexTensor {
    let codes = &inputs[0];
    let rows = codes.layout().shape()[0];
    let codes = slice::<u32>(codes);
    let table: Vec<f32> = (0..=255).map(|code| format.decode(code)).collect();
    let width = match kind {
        ScalingKind::Tensor => depth,
        ScalingKind::Blocks { .. } => BLOCK,
        ScalingKind::Mx => MX_BLOCK,
    };
    let scale = scales(&inputs[1], kind, depth);
    let mut values = vec![0f32; rows * depth];
    for_rows(
        &mut values,
        depth,
        #[inline(always)]
        |row, values| {
            let codes = &codes[row * words(depth)..];
            for (block, values) in values.chunks_mut(width).enumerate() {
                let scale = scale(row, block);
                let codes = &codes[block * width / 4..];
                for (values, word) in values.chunks_mut(4).zip(codes) {
                    let codes = values.iter_mut().zip(word.to_le_bytes());
                    codes.for_each(|(value, code)| *value = table[usize::from(code)] * scale);
                }
            }
        },
    );
    tensor(values, [rows, depth])
}

/// Returns a function that maps a row and a block to their scale.
fn scales(
    scales: &FlexTensor,
    kind: ScalingKind,
    depth: usize,
) -> Box<dyn Fn(usize, usize) -> f32 + Sync + '_> {
    match kind {
        ScalingKind::Tensor => {
            let scale = slice::<f32>(scales)[0];
            Box::new(move |_, _| scale)
        }
        ScalingKind::Blocks { .. } => {
            let scales = slice::<f32>(scales);
            Box::new(move |row, block| scales[row / kind.height() * depth.div_ceil(BLOCK) + block])
        }
        ScalingKind::Mx => {
            let scales = slice::<u32>(scales);
            Box::new(move |row, block| {
                let word = scales[row * mx_words(depth) + block / 4];
                e8m0::decode((word >> (8 * (block % 4))) as u8)
            })
        }
    }
}
