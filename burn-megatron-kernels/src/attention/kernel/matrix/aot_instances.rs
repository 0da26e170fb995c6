//! AOT instances with the sizes of a large model.

use cubecl::ir::{ElemType, FloatKind};

use super::forward::matrix_forward::MatrixForward;
use super::keys::matrix_keys::MatrixKeys;
use super::plan::{MAX_VECTOR, TileMultiplier, blocks};
use super::queries::matrix_queries::MatrixQueries;
use crate::cube::instance::{AotInstance, AotTarget, given, kernel};

/// Every kernel in both types for heads of width 64, 96 and 128.
pub(in crate::attention::kernel) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = Vec::new();
    for (name, kind) in [("f16", FloatKind::F16), ("bf16", FloatKind::BF16)] {
        for width in [64, 96, 128] {
            let dtype = ElemType::Float(kind);
            let label = |kernel: &str| format!("attention/matrix-{kernel}/{name}/{width}");
            let memory = target.device.hardware.max_shared_memory_size;
            let [forward, backward] =
                blocks(width, MAX_VECTOR, memory, TileMultiplier::MatrixUnits);
            let kernel = kernel!(
                target, forward.units() as u32, MatrixForward
                [_ _ _ (given(true)) (given(true)) _ _ _ _]
                (MAX_VECTOR, forward, dtype)
            );
            all.push(AotInstance::multiplying(label("forward"), kernel));
            let units = backward.units() as u32;
            let kernel = kernel!(
                target, units, MatrixQueries
                [_ _ _ _ _ _ (given(true)) _ _ _ _]
                (MAX_VECTOR, backward, dtype)
            );
            all.push(AotInstance::multiplying(label("queries"), kernel));
            let kernel = kernel!(
                target, units, MatrixKeys
                [_ _ _ _ _ _ (given(true)) _ _ _ _ _]
                (MAX_VECTOR, backward, dtype)
            );
            all.push(AotInstance::multiplying(label("keys"), kernel));
        }
    }
    all
}
