//! The dtype of sums.

use burn::tensor::DType;

/// Returns the dtype in which values of this dtype are summed: f64 for f64, and f32 for all other dtypes.
pub(super) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
