//! Grouped matrix multiplication of all experts in one kernel launch, with `mma.sync` of 16 by 8 by 16 and sums in f32.
//!
//! A cube computes 128 by 128 elements of the result of one expert. Each of its four warps computes 64 by 64 elements.
//! The numbers of rows per expert are available on the host, which creates a list with the rows of each cube and
//! uploads the list. This takes one kernel launch and one copy for any number of experts, and every cube has work. Each
//! sum is computed by one warp in the order of its terms, so that two runs give the same bits.

use burn::tensor::DType;
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;

mod aot_instances;
mod plan;
mod product;
mod sums;
#[cfg(test)]
mod tests;
mod weight_gradient;

pub(crate) use aot_instances::aot_instances;

use super::backward::{ProductOp, WeightGradientOp};
use crate::cube::mma::{CHUNK, PAIR, aligned, missing_support};
use crate::cube::{empty, launch, own, upload};
use plan::{Factors, TILE, UNITS, in_one_launch, row_tiles, summed_rows};
use product::grouped_product;
use weight_gradient::grouped_weight_gradient;

/// Returns whether [`product`] supports `op`.
pub(super) fn takes_product(op: &ProductOp, x: &CubeTensor, weights: &CubeTensor) -> bool {
    let (depth, columns) = (weights.meta.shape()[1], weights.meta.shape()[2]);
    let experts = op.group_sizes.iter().filter(|size| **size > 0).count();
    let rows = x.meta.shape()[0].div_ceil(experts.max(1));
    takes(x, [depth, columns], experts, [rows, columns])
}

/// Returns whether [`weight_gradient`] supports `op`.
pub(super) fn takes_weight_gradient(
    op: &WeightGradientOp,
    x: &CubeTensor,
    gradient: &CubeTensor,
) -> bool {
    let sizes = [x, gradient].map(|factor| factor.meta.shape()[1]);
    takes(x, sizes, op.group_sizes.len(), sizes)
}

fn takes(x: &CubeTensor, widths: [usize; 2], launches: usize, result: [usize; 2]) -> bool {
    let is_possible = missing_support(&x.client, x.dtype).is_none()
        && widths
            .iter()
            .all(|width| *width > 0 && width.is_multiple_of(CHUNK));
    #[cfg(test)]
    if let Some(forced) = FORCED.get() {
        return forced && is_possible;
    }
    let hardware = &x.client.properties().hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(u32::MAX);
    is_possible && in_one_launch(launches, result, multiprocessors as usize)
}

/// Multiplies the rows `[rows, in]` of each expert by its weights `[experts, in, out]`. The weights are read as they
/// are stored, without a copy.
pub(super) fn product(op: &ProductOp, x: CubeTensor, weights: CubeTensor) -> CubeTensor {
    let (depth, columns) = (weights.meta.shape()[1], weights.meta.shape()[2]);
    let transposed = weights.meta.strides()[1] < weights.meta.strides()[2];
    let weights = if transposed {
        permute(weights, &[0, 2, 1])
    } else {
        weights
    };
    let (x, weights) = (aligned(x), aligned(weights));
    let y = empty(&x, [x.meta.shape()[0], columns], x.dtype);
    let tiles = row_tiles(&op.group_sizes);
    let count = tiles.len() / 3;
    if count == 0 {
        return y;
    }
    let chunks = |tensor: &CubeTensor, dim: usize| (tensor.meta.strides()[dim] / CHUNK) as u32;
    let client = x.client.clone();
    let (dtype, bf16) = element(&x);
    let tiles = upload(&x, &tiles);
    let (x_stride, weight_stride) = (chunks(&x, 0), chunks(&weights, 1));
    let expert_stride = chunks(&weights, 0);
    // SAFETY: cubes access only rows of their expert, which the caller checked.
    unsafe {
        launch!(
            grouped_product,
            [client, count * columns.div_ceil(TILE), UNITS as u32],
            [CHUNK],
            [x, weights, tiles, &y],
            (x_stride, weight_stride, expert_stride),
            (count as u32, depth as u32, columns as u32),
            (Factors::of_product(transposed, bf16), dtype)
        );
    }
    y
}

/// Computes the gradient of the weights in the flat buffer.
pub(super) fn weight_gradient(
    op: &WeightGradientOp,
    x: CubeTensor,
    gradient: CubeTensor,
    flat: CubeTensor,
) -> CubeTensor {
    let flat = own(flat);
    let rows = summed_rows(&op.group_sizes, op.add);
    let experts = rows.len() / 3;
    if experts == 0 {
        return flat;
    }
    let [inputs, outputs] = [&x, &gradient].map(|factor| factor.meta.shape()[1]);
    let client = x.client.clone();
    let (dtype, bf16) = element(&x);
    let rows = upload(&x, &rows);
    let vector = if op.offset.is_multiple_of(PAIR) {
        PAIR
    } else {
        1
    };
    let cubes = experts * inputs.div_ceil(TILE) * outputs.div_ceil(TILE);
    // SAFETY: as for [`product`]. The place in the flat buffer was checked.
    unsafe {
        launch!(
            grouped_weight_gradient,
            [client, cubes, UNITS as u32],
            [CHUNK, vector],
            [x, gradient, rows, &flat],
            (experts as u32, inputs as u32, outputs as u32),
            ((op.offset / vector) as u32, op.add),
            (Factors::of_weight_gradient(bf16), dtype)
        );
    }
    flat
}

/// Returns the element type of the operands, and whether it is bf16.
fn element(x: &CubeTensor) -> (ElemType, bool) {
    let dtype = burn::backend::cubecl::dtype_to_storage_type(x.dtype);
    (dtype, x.dtype == DType::BF16)
}

#[cfg(test)]
thread_local! {
    static FORCED: std::cell::Cell<Option<bool>> = const { std::cell::Cell::new(None) };
}

/// Runs `work` with or without the kernels of this module. If `forced` is true, they are used wherever possible,
/// otherwise nowhere.
#[cfg(test)]
pub(super) fn with_one_launch<T>(forced: bool, work: impl FnOnce() -> T) -> T {
    FORCED.set(Some(forced));
    let result = work();
    FORCED.set(None);
    result
}
