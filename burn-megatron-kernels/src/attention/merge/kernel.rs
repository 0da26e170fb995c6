//! The CubeCL kernel of the merge. It computes one vector of the output per unit.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use super::UNSEEN;
use crate::cube::instance::{AotList, instance};
use crate::cube::{RowPlan, empty, launch, own};

/// The number of units per cube. Units share no data.
const UNITS: u32 = 256;

/// Merges one vector of the output per unit. `out` `[batch, queries, heads, width]` is written in place. Log-sum-exps
/// are `[batch, heads, queries]`.
#[cube(launch_unchecked)]
fn merge_kernel<F: Float, N: Size>(
    out: &mut [Vector<F, N>],
    lse: &[F],
    other: &[Vector<F, N>],
    other_lse: &[F],
    merged_lse: &mut [F],
    vectors: u32,
    queries: u32,
    heads: u32,
    #[comptime] columns: u32,
    #[define(F)] _dtype: ElemType,
) {
    let at = CUBE_POS as u32 * UNITS + UNIT_POS;
    if at < vectors {
        let (row, column) = (at / columns, at % columns);
        let (head, query, batch) = (row % heads, row / heads % queries, row / heads / queries);
        let statistic = ((batch * heads + head) * queries + query) as usize;
        let (one, two) = (lse[statistic], other_lse[statistic]);
        let largest = max(one, two);
        let sees = largest > F::new(comptime!(UNSEEN as f32));
        // If no key is visible, both log-sum-exps are minus infinity and their difference is NaN.
        let base = select(sees, largest, F::new(0.0));
        let mut share = (one - base).exp();
        let mut other_share = (two - base).exp();
        let sum = select(sees, share + other_share, F::new(1.0));
        share /= sum;
        other_share /= sum;
        let at = at as usize;
        out[at] = out[at] * Vector::new(share) + other[at] * Vector::new(other_share);
        if column == 0 {
            merged_lse[statistic] = select(sees, base + sum.ln(), largest);
        }
    }
}

/// Merges two results. See [`merge`](super::merge). All inputs must be contiguous and must not be empty.
pub(super) fn merge(mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let (other_lse, other, lse) = (inputs.remove(3), inputs.remove(2), inputs.remove(1));
    let out = own(inputs.remove(0));
    let client = out.client.clone();
    let shape = out.shape();
    let width = shape[3];
    let vector = RowPlan::new(&client, out.dtype, width).vector;
    let vectors = shape.num_elements() / vector;
    let merged = empty(&lse, lse.shape(), lse.dtype);
    // SAFETY: vectors past the end are skipped, and the public function checks the shapes.
    unsafe {
        launch!(
            merge_kernel,
            [client, vectors.div_ceil(UNITS as usize), UNITS],
            [vector],
            [&out, lse, other, other_lse, &merged],
            (vectors as u32, shape[1] as u32, shape[2] as u32),
            ((width / vector) as u32, dtype_to_storage_type(out.dtype))
        );
    }
    vec![out, merged]
}

/// Adds the AOT instance in f32 for heads of width 128.
pub(crate) fn aot_instances(list: &mut AotList) {
    let f32 = ElemType::Float(FloatKind::F32);
    instance!(
        list.streaming("attention/merge/f32"), UNITS,
        merge_kernel::MergeKernel [_ _ _ _ _ _ _ _] (4, 32, f32)
    );
}
