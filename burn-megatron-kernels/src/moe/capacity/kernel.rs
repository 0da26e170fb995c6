//! The CubeCL kernel. A unit computes the rank of one pair among the pairs of the same expert.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::cube::instance::{AotList, instance};
use crate::cube::{empty, launch};
use crate::launch::exactly;

/// The number of units per cube.
const UNITS: u32 = 256;

#[cube(launch_unchecked)]
fn keep_first_kernel(
    indices: &Tensor<i32>,
    pair_to_row: &Tensor<i32>,
    offsets: &Tensor<i32>,
    kept: &mut Tensor<i32>,
    pairs: u32,
    capacity: u32,
) {
    let pair = ABSOLUTE_POS;
    if pair < pairs as usize {
        let (expert, row) = (indices[pair], pair_to_row[pair]);
        let mut result = expert;
        if row >= 0i32 {
            let before = (row - offsets[expert as usize]) as u32;
            if before >= capacity {
                result = -1i32;
            }
        }
        kept[pair] = result;
    }
}

#[cube(launch_unchecked)]
fn keep_largest_kernel<F: Float>(
    indices: &Tensor<i32>,
    pair_to_row: &Tensor<i32>,
    row_to_pair: &Tensor<i32>,
    offsets: &Tensor<i32>,
    weights: &Tensor<F>,
    kept: &mut Tensor<i32>,
    pairs: u32,
    capacity: u32,
    #[define(F)] _dtype: ElemType,
) {
    let pair = ABSOLUTE_POS;
    if pair < pairs as usize {
        let (expert, row) = (indices[pair], pair_to_row[pair]);
        let mut result = expert;
        if row >= 0i32 {
            let first = offsets[expert as usize] as u32;
            let end = offsets[expert as usize + 1] as u32;
            let own = weights[pair];
            let mut before = 0u32;
            if end - first > capacity {
                for other in first..end {
                    let weight = weights[row_to_pair[other as usize] as usize];
                    let is_first = weight > own || (weight == own && other < row as u32);
                    if is_first {
                        before += 1u32;
                    }
                }
            }
            if before >= capacity && end - first > capacity {
                result = -1i32;
            }
        }
        kept[pair] = result;
    }
}

/// Applies the capacity. See [`keep_within_capacity`](super::keep_within_capacity).
pub(super) fn keep(capacity: usize, mut inputs: Vec<CubeTensor>) -> CubeTensor {
    let weights = (inputs.len() > 4).then(|| inputs.remove(4));
    let [indices, pair_to_row, row_to_pair, offsets] = exactly(inputs);
    let client = indices.client.clone();
    let shape = indices.meta.shape().clone();
    let pairs = shape.num_elements();
    let kept = empty(&indices, shape, DType::I32);
    let cubes = pairs.div_ceil(UNITS as usize);
    let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
    // SAFETY: units past the pairs access no memory, and rows and pairs come from a map.
    unsafe {
        match weights {
            None => launch!(
                keep_first_kernel,
                [client, cubes, UNITS],
                [],
                [indices, pair_to_row, offsets, &kept],
                (pairs as u32, capacity)
            ),
            Some(weights) => {
                let dtype = dtype_to_storage_type(weights.dtype);
                launch!(
                    keep_largest_kernel,
                    [client, cubes, UNITS],
                    [],
                    [indices, pair_to_row, row_to_pair, offsets, weights, &kept],
                    (pairs as u32, capacity),
                    (dtype)
                );
            }
        }
    }
    kept
}

/// Adds one instance of each kernel, with weights in f32.
pub(crate) fn aot_instances(list: &mut AotList) {
    instance!(
        list.other("moe/keep-first"), UNITS,
        keep_first_kernel::KeepFirstKernel [_ _ _ _ _ _] ()
    );
    let dtype = dtype_to_storage_type(DType::F32);
    instance!(
        list.other("moe/keep-largest"), UNITS,
        keep_largest_kernel::KeepLargestKernel [_ _ _ _ _ _ _ _] (dtype)
    );
}
