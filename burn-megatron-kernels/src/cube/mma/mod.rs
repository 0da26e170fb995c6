//! Building blocks of kernels for NVIDIA tensor cores: instructions, and 16-bit tiles in shared
//! memory.

use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::features::{MmaConfig, Plane};
use cubecl::ir::{ElemType, FloatKind};

pub(crate) mod ptx;
pub(crate) mod swizzle;

/// The number of 16-bit elements in 16 bytes, which is the size of one copy and of one row of an `ldmatrix` matrix.
pub(crate) const CHUNK: usize = 8;

/// The size of a chunk in bytes.
pub(crate) const CHUNK_BYTES: usize = 2 * CHUNK;

/// The number of f32 elements that a unit writes at once to a flat buffer.
pub(crate) const PAIR: usize = 2;

/// The number of units per warp.
pub(crate) const WARP: usize = 32;

/// Returns the first feature that matrix multiplications of `dtype` require and the device does not support.
pub(crate) fn missing_support(client: &Client, dtype: DType) -> Option<String> {
    let properties = client.properties();
    let kind = match dtype {
        DType::F16 => FloatKind::F16,
        DType::BF16 => FloatKind::BF16,
        other => return Some(format!("mma.sync takes F16 and BF16, not {other:?}")),
    };
    let wanted = MmaConfig {
        a_type: ElemType::Float(kind),
        b_type: ElemType::Float(kind),
        cd_type: ElemType::Float(FloatKind::F32),
        m: 16,
        n: 8,
        k: 16,
    };
    let features = &properties.features;
    let hardware = &properties.hardware;
    let checks = [
        (
            features.matmul.mma.contains(&wanted),
            "mma.sync of 16x8x16 with sums in f32",
        ),
        (
            features.matmul.ldmatrix.contains(&wanted.a_type),
            "ldmatrix",
        ),
        (features.copy_async, "cp.async"),
        (features.plane.contains(Plane::Ops), "warp shuffles"),
        (features.plane.contains(Plane::Sync), "warp barriers"),
        (
            hardware.plane_size_min == WARP as u32 && hardware.plane_size_max == WARP as u32,
            "warps of 32 units",
        ),
    ];
    let missing = checks.iter().find(|(is_there, _)| !is_there);
    missing.map(|(_, what)| format!("the device does not support {what} in {dtype:?}"))
}

/// Returns a tensor whose rows start at multiples of 16 bytes, as copies with `cp.async` require. A tensor with other
/// strides is copied.
pub(crate) fn aligned(tensor: CubeTensor) -> CubeTensor {
    let strides = tensor.meta.strides();
    let (last, others) = strides.split_last().unwrap_or((&1, &[]));
    if *last == 1 && others.iter().all(|stride| stride.is_multiple_of(CHUNK)) {
        tensor
    } else {
        into_contiguous(tensor)
    }
}
