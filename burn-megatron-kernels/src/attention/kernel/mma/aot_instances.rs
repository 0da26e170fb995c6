//! AOT instances with the sizes of a large model.

use cubecl::ir::{ElemType, FloatKind};

use super::forward::mma_forward::MmaForward;
use super::keys::mma_keys::MmaKeys;
use super::plan::{CHUNK, shapes};
use super::queries::mma_queries::MmaQueries;
use crate::cube::instance::{AotInstance, AotTarget, given, kernel};

/// Every kernel in both types for heads of width 64, 96 and 128, with all that a problem may ask for.
pub(in crate::attention::kernel) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = Vec::new();
    for (name, kind) in [("f16", FloatKind::F16), ("bf16", FloatKind::BF16)] {
        for width in [64, 96, 128] {
            let dtype = ElemType::Float(kind);
            let label = |kernel: &str| format!("attention/mma-{kernel}/{name}/{width}");
            let [forward, queries, keys] = shapes(width, kind == FloatKind::BF16);
            let kernel = kernel!(
                target, forward.units() as u32, MmaForward
                [_ _ _ (given(true)) (given(true)) _ _ _ _]
                (CHUNK, forward, dtype)
            );
            all.push(AotInstance::multiplying(label("forward"), kernel));
            let kernel = kernel!(
                target, queries.units() as u32, MmaQueries
                [_ _ _ _ _ _ (given(true)) _ _ _ _]
                (CHUNK, queries, dtype)
            );
            all.push(AotInstance::multiplying(label("queries"), kernel));
            let kernel = kernel!(
                target, keys.units() as u32, MmaKeys
                [_ _ _ _ _ _ (given(true)) _ _ _ _ _]
                (CHUNK, keys, dtype)
            );
            all.push(AotInstance::multiplying(label("keys"), kernel));
        }
    }
    all
}
