//! Computes the memory of FP8 weights before they are allocated.

use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::fp8::{BLOCK, MX_BLOCK, ROW_BYTES, Scales};

use crate::nn::fp8::WeightQuantizer;

/// The layout of the scales of one copy of a weight.
enum ScaleLayout {
    PerTensor,
    /// One scale per block with this number of rows.
    Blocks(usize),
    Mx,
}

/// Returns the bytes of both copies of a weight `[in, out]`, including their scales.
pub(in crate::data_parallel) fn quantized_bytes(
    quantizer: &dyn WeightQuantizer,
    [rows, columns]: [usize; 2],
    device: &Device,
) -> usize {
    let [rowwise, columnwise] = scale_layouts(quantizer, device);
    copy_bytes(rowwise, [rows, columns]).saturating_add(copy_bytes(columnwise, [columns, rows]))
}

/// Returns the scale layouts of the rowwise and the columnwise copy, by quantizing a weight of one element.
fn scale_layouts(quantizer: &dyn WeightQuantizer, device: &Device) -> [ScaleLayout; 2] {
    if quantizer.has_one_scale() {
        return [ScaleLayout::PerTensor, ScaleLayout::PerTensor];
    }
    let one = quantizer.quantize(Tensor::zeros([1, 1], (device, DType::F32)));
    [one.rowwise, one.columnwise].map(|copy| match copy.scales {
        Scales::Tensor(_) => ScaleLayout::PerTensor,
        Scales::Blocks { height, .. } => ScaleLayout::Blocks(height),
        Scales::Mx(_) => ScaleLayout::Mx,
    })
}

fn copy_bytes(scales_of: ScaleLayout, [rows, depth]: [usize; 2]) -> usize {
    let codes = rows.saturating_mul(depth.next_multiple_of(ROW_BYTES));
    let scales = match scales_of {
        ScaleLayout::PerTensor => 4,
        ScaleLayout::Blocks(height) => 4 * rows.div_ceil(height) * depth.div_ceil(BLOCK),
        // Each scale is one byte, and rows of scales are padded to complete words.
        ScaleLayout::Mx => rows * depth.div_ceil(MX_BLOCK).next_multiple_of(4),
    };
    codes.saturating_add(scales)
}
