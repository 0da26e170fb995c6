//! The CubeCL kernels: a unit works on a group of elements, at least the four of one Philox block.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

use super::DropoutMask;
use crate::cube::instance::{AotInstance, AotTarget};

mod backward;
mod forward;
mod mask;

pub(super) use backward::backward;
pub(super) use forward::forward;
use mask::{MaskArgs, factors, masked};

/// Units of a cube of the element-wise kernels.
const UNITS: u32 = 256;

/// Words of a block, and the least elements of a group.
const WORDS: usize = 4;

/// How the elements of a mask map to Philox blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum MaskAlignment {
    /// Nothing is dropped.
    None,
    /// Four elements use the four words of one block.
    Aligned,
    /// Each element uses the word of its own draw.
    Any,
}

impl MaskAlignment {
    /// For groups that start at multiples of `start`.
    fn new(mask: Option<&DropoutMask>, start: usize) -> Self {
        match mask {
            None => Self::None,
            Some(mask) if mask.is_aligned() && start.is_multiple_of(WORDS) => Self::Aligned,
            Some(_) => Self::Any,
        }
    }
}

/// Elements of one load that rows of `width` allow: at most 128 bits of the widest type.
fn vector(client: &Client, dtypes: &[DType], width: usize) -> usize {
    let widest = dtypes.iter().map(DType::size).max().unwrap_or(4);
    let mut sizes = client.io_optimized_vector_sizes(widest);
    sizes.find(|size| width.is_multiple_of(*size)).unwrap_or(1)
}

fn optional<T: CubePrimitive>(tensor: Option<CubeTensor>) -> ComptimeOptionArgs<OwnedTensor<T>> {
    tensor.map(CubeTensor::into_tensor_arg).into()
}

/// The AOT instances of the operation.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = forward::aot_instances(target);
    all.extend(backward::aot_instances(target));
    all
}
