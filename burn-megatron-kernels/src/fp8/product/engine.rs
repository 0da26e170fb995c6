//! A description of how a device multiplies FP8 matrices.

use burn::tensor::Device;

#[cfg(feature = "cuda")]
use crate::gemm::cublaslt::CublasLt;
use crate::gemm::engine_of;

/// The description of the emulated multiplication.
pub(super) const DECODED: &str = "decoded to f32 and multiplied";

pub(super) fn describe(device: &Device) -> String {
    #[cfg(feature = "cuda")]
    match CublasLt::on(device) {
        Some(Ok(engine)) => return super::problem::describe(engine.chip()),
        Some(Err(reason)) => return format!("{DECODED} by {}: {reason}", engine_of(device)),
        None => {}
    }
    format!("{DECODED} by {}", engine_of(device))
}
