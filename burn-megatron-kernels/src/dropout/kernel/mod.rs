//! The CubeCL kernels. A unit processes a group of elements, which has at least the four elements of one Philox block.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use cubecl::client::Client;

use super::DropoutMask;
use crate::cube::instance::AotList;

pub(crate) mod alignment;
mod backward;
mod forward;
mod mask;

use alignment::{MaskAlignment, WORDS};
pub(super) use backward::backward;
pub(super) use forward::forward;
use mask::{MaskArgs, factors, masked};

/// The number of units per cube of the element-wise kernels.
const UNITS: u32 = 256;

/// Returns the number of elements per load for rows of `width` elements. A load has at most 128 bits in the widest
/// type.
fn vector(client: &Client, dtypes: &[DType], width: usize) -> usize {
    let widest = dtypes.iter().map(DType::size).max().unwrap_or(4);
    let mut sizes = client.io_optimized_vector_sizes(widest);
    sizes.find(|size| width.is_multiple_of(*size)).unwrap_or(1)
}

/// Adds the AOT instances of the operation.
pub(crate) fn aot_instances(list: &mut AotList) {
    forward::aot_instances(list);
    backward::aot_instances(list);
}
