//! The numbers that NCCL uses for types and reductions (`ncclDataType_t`, `ncclRedOp_t`).

use std::ffi::c_int;

use super::version::Version;
use crate::buffer::DType;
use crate::call::ReduceOp;

/// An element type of NCCL that the engine can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NcclType {
    /// An element type that buffers support.
    Plain(DType),
    /// An 8-bit float with 4 exponent bits. Tensors and buffers do not support this type. FP8 values are sent as
    /// [`DType::U8`], which cannot be summed.
    E4M3,
    /// An 8-bit float with 5 exponent bits. See [`E4M3`](Self::E4M3).
    E5M2,
}

impl NcclType {
    pub const ALL: [Self; 9] = [
        Self::Plain(DType::F64),
        Self::Plain(DType::F32),
        Self::Plain(DType::BF16),
        Self::Plain(DType::F16),
        Self::Plain(DType::I64),
        Self::Plain(DType::I32),
        Self::Plain(DType::U8),
        Self::E4M3,
        Self::E5M2,
    ];

    pub fn number(self) -> c_int {
        match self {
            Self::Plain(DType::U8) => 1,
            Self::Plain(DType::I32) => 2,
            Self::Plain(DType::I64) => 4,
            Self::Plain(DType::F16) => 6,
            Self::Plain(DType::F32) => 7,
            Self::Plain(DType::F64) => 8,
            Self::Plain(DType::BF16) => 9,
            Self::E4M3 => 10,
            Self::E5M2 => 11,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(dtype) => dtype.name(),
            Self::E4M3 => "e4m3",
            Self::E5M2 => "e5m2",
        }
    }

    /// Returns the first supported NCCL version that has this type.
    pub fn min_version(self) -> Version {
        match self {
            Self::Plain(_) => Version::MIN,
            Self::E4M3 | Self::E5M2 => Version::FP8,
        }
    }
}

/// Returns the names of the types that an NCCL version supports, for example `"f64 f32 bf16 f16 i64 i32 u8"`.
pub(super) fn names(version: Version) -> String {
    let had = NcclType::ALL
        .into_iter()
        .filter(|wire| wire.min_version() <= version);
    had.map(NcclType::name).collect::<Vec<_>>().join(" ")
}

/// Returns the `ncclRedOp_t` of a reduction. The order of the additions in a sum depends on NCCL's algorithm and not on
/// the rank. A maximum or minimum may not be NaN although one of the inputs is NaN.
pub(super) fn reduction(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Average => 4,
    }
}

/// Checks that the numbers match the bindings that CubeCL is built with.
#[cfg(feature = "cuda")]
const _: () = {
    use cudarc::nccl::sys::{ncclDataType_t as Type, ncclRedOp_t as Op};
    assert!(Type::ncclUint8 as u32 == 1 && Type::ncclInt32 as u32 == 2);
    assert!(Type::ncclInt64 as u32 == 4 && Type::ncclFloat16 as u32 == 6);
    assert!(Type::ncclFloat32 as u32 == 7 && Type::ncclFloat64 as u32 == 8);
    assert!(Type::ncclBfloat16 as u32 == 9);
    assert!(Type::ncclFloat8e4m3 as u32 == 10 && Type::ncclFloat8e5m2 as u32 == 11);
    assert!(Op::ncclSum as u32 == 0 && Op::ncclMax as u32 == 2);
    assert!(Op::ncclMin as u32 == 3 && Op::ncclAvg as u32 == 4);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_a_number_of_its_own() {
        let mut numbers = NcclType::ALL.map(NcclType::number);
        numbers.sort();
        assert_eq!(numbers, [1, 2, 4, 6, 7, 8, 9, 10, 11]);
        assert_eq!(ReduceOp::ALL.map(reduction), [0, 4, 2, 3]);
    }

    #[test]
    fn eight_bits_come_with_their_version() {
        let plain = "f64 f32 bf16 f16 i64 i32 u8";
        assert_eq!(names(Version::MIN), plain);
        assert_eq!(names(Version::new(2, 23, 4)), plain);
        assert_eq!(names(Version::FP8), format!("{plain} e4m3 e5m2"));
    }
}
