//! The data type of sums.

use burn::tensor::DType;

/// Returns the type in which values of this type are summed: f64 for f64, f32 otherwise.
pub(super) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
