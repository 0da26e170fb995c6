//! How much memory weights in 8 bits take, before they are made.

use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::fp8::{BLOCK, MX_BLOCK, ROW_BYTES, Scales};

use crate::nn::fp8::WeightQuantizer;

/// Which scales a copy has.
enum Kind {
    One,
    /// So many rows share a scale.
    Blocks(usize),
    Mx,
}

/// The bytes of both copies of a weight `[in, out]`, with their scales.
pub(in crate::data_parallel) fn bytes(
    quantizer: &dyn WeightQuantizer,
    [rows, columns]: [usize; 2],
    device: &Device,
) -> usize {
    let [rowwise, columnwise] = kinds(quantizer, device);
    of_copy(rowwise, [rows, columns]).saturating_add(of_copy(columnwise, [columns, rows]))
}

/// What scales the rowwise and the columnwise copy have: a weight of one element tells.
fn kinds(quantizer: &dyn WeightQuantizer, device: &Device) -> [Kind; 2] {
    if quantizer.has_one_scale() {
        return [Kind::One, Kind::One];
    }
    let one = quantizer.quantize(Tensor::zeros([1, 1], (device, DType::F32)));
    [one.rowwise, one.columnwise].map(|copy| match copy.scales {
        Scales::Tensor(_) => Kind::One,
        Scales::Blocks { height, .. } => Kind::Blocks(height),
        Scales::Mx(_) => Kind::Mx,
    })
}

fn of_copy(kind: Kind, [rows, depth]: [usize; 2]) -> usize {
    let codes = rows.saturating_mul(depth.next_multiple_of(ROW_BYTES));
    let scales = match kind {
        Kind::One => 4,
        Kind::Blocks(height) => 4 * rows.div_ceil(height) * depth.div_ceil(BLOCK),
        // One byte each, in whole words.
        Kind::Mx => rows * depth.div_ceil(MX_BLOCK).next_multiple_of(4),
    };
    codes.saturating_add(scales)
}
