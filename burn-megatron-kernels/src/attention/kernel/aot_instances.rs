//! AOT instances with the sizes of a large model.

use cubecl::ir::{ElemType, FloatKind};

use super::backward::{attention_delta, attention_keys, attention_queries, attention_sink};
use super::forward::attention_forward;
use super::plan::typical;
use super::tile::{
    AttentionSizesCompilationArg, AttentionStridesCompilationArg, DeviceMaskRangeCompilationArg,
    DeviceStridesCompilationArg,
};
use crate::cube::instance::{AotInstance, AotTarget, default_fields, given, kernel, types};

default_fields!(DeviceStridesCompilationArg [offset batch row head]);
default_fields!(DeviceMaskRangeCompilationArg [shift before after columns rows]);
default_fields!(AttentionStridesCompilationArg [q k v out]);
default_fields!(AttentionSizesCompilationArg [mask_range scale batches heads heads_per_group]);

/// Every kernel in every type for heads of width 64, 96 and 128.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    const UNITS: u32 = 256;
    let sink = kernel!(target, UNITS, attention_sink::AttentionSink [_ _ _ _ _ _ _] (UNITS, true));
    let mut all = vec![AotInstance::other("attention/sink/f32".into(), sink)];
    let f32 = ElemType::Float(FloatKind::F32);
    for (name, dtype, _) in types() {
        for width in [64, 96, 128] {
            let vector = 4;
            let [forward, backward] = typical(width, vector);
            let label = |kernel: &str| format!("attention/{kernel}/{name}/{width}");
            let kernel = kernel!(
                target, forward.units() as u32, attention_forward::AttentionForward
                [_ _ _ (given(true)) (given(true)) _ _ _ _]
                (vector, forward, false, dtype)
            );
            all.push(AotInstance::other(label("forward"), kernel));
            let kernel = kernel!(
                target, UNITS, attention_delta::AttentionDelta
                [_ _ _ _ _ _]
                (vector, width / vector, UNITS, dtype)
            );
            all.push(AotInstance::other(label("delta"), kernel));
            let units = backward.units() as u32;
            let kernel = kernel!(
                target, units, attention_queries::AttentionQueries
                [_ _ _ _ _ _ (given(true)) _ _ _ _]
                (vector, backward, dtype)
            );
            all.push(AotInstance::other(label("queries"), kernel));
            for (name, add, sums) in [("keys", false, dtype), ("keys-added", true, f32)] {
                let kernel = kernel!(
                    target, units, attention_keys::AttentionKeys
                    [_ _ _ _ _ _ (given(true)) _ _ _ _ _]
                    (vector, backward, [add; 2], [dtype, sums])
                );
                all.push(AotInstance::other(label(name), kernel));
            }
        }
    }
    all.extend(super::mma::aot_instances(target));
    all.extend(crate::attention::merge::kernel::aot_instances(target));
    all
}
