//! Reports of the quantization errors of a layer.

use burn::tensor::Tensor;
use burn_megatron_kernels::fp8::{
    Format, Fp8Matrix, MX_BLOCK, Scales, Statistics, e8m0, statistics,
};

use super::{Fp8Layer, Operand};

/// The measured quantization error of one tensor of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct OperandReport {
    /// The path of the layer.
    pub path: String,
    /// The measured tensor of the layer.
    pub operand: Operand,
    /// The FP8 format of the tensor.
    pub format: Format,
    /// The name of the recipe, as it is written in flags.
    pub recipe: &'static str,
    /// The largest magnitude in this rank's part of the tensor.
    pub amax: f64,
    /// The smallest and the largest scale of all blocks. Values are multiplied by the scale before they are rounded to
    /// FP8.
    pub scale: (f32, f32),
    /// The fraction, from 0 to 1, of the scaled values that exceed the largest value of the format.
    pub saturated: f64,
    /// The fraction, from 0 to 1, of the nonzero values that were rounded to zero.
    pub flushed: f64,
    /// The signal-to-noise ratio in decibels. It is infinite if there is no error.
    pub snr_db: f64,
}

impl OperandReport {
    /// Measures the error of `copy`, the quantized form of the tensor `x` of the layer.
    pub(super) fn new(layer: &Fp8Layer, operand: Operand, x: Tensor<2>, copy: &Fp8Matrix) -> Self {
        let Statistics {
            amax,
            saturated,
            flushed,
            snr,
        } = statistics(x, copy);
        Self {
            path: layer.path().into(),
            operand,
            format: layer.format(operand),
            recipe: layer.recipe().name(),
            amax,
            scale: scales(copy),
            saturated,
            flushed,
            snr_db: snr,
        }
    }
}

/// Returns the smallest and the largest scale.
fn scales(copy: &Fp8Matrix) -> (f32, f32) {
    let inverse_scales: Vec<f32> = match &copy.scales {
        Scales::Tensor(scale) => floats(scale.clone()),
        Scales::Blocks { scales, .. } => floats(scales.clone()),
        Scales::Mx(scales) => {
            let blocks = copy.depth.div_ceil(MX_BLOCK);
            let width = scales.dims()[1].max(1);
            let words = scales.clone().into_data();
            let words: Vec<u32> = words.iter::<u32>().collect();
            // The remainder of the last word of a row is padding.
            let codes = words.chunks(width).flat_map(|row| {
                let code = |block: usize| (row[block / 4] >> (8 * (block % 4))) as u8;
                (0..blocks).map(code)
            });
            codes.map(e8m0::decode).collect()
        }
    };
    let scales = inverse_scales.into_iter().map(|inverse| 1.0 / inverse);
    scales.fold((f32::INFINITY, 0.0), |(low, high), scale| {
        (scale.min(low), scale.max(high))
    })
}

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}
