//! AOT instances with the sizes of a large model.

use cubecl::ir::{ElemType, FloatKind};

use super::backward::{attention_delta, attention_keys, attention_queries, attention_sink};
use super::forward::attention_forward;
use super::plan::typical;
use super::tile::{
    AttentionSizesCompilationArg, AttentionStridesCompilationArg, DeviceMaskRangeCompilationArg,
    DeviceStridesCompilationArg,
};
use crate::cube::instance::{AotList, default_fields, given, instance, types};

default_fields!(DeviceStridesCompilationArg [offset batch row head]);
default_fields!(DeviceMaskRangeCompilationArg [shift before after columns rows]);
default_fields!(AttentionStridesCompilationArg [q k v out]);
default_fields!(AttentionSizesCompilationArg [mask_range scale batches heads heads_per_group]);

/// Adds every kernel in every type for heads of width 64, 96 and 128.
pub(crate) fn aot_instances(list: &mut AotList) {
    const UNITS: u32 = 256;
    instance!(
        list.other("attention/sink/f32"), UNITS,
        attention_sink::AttentionSink [_ _ _ _ _ _ _] (UNITS, true)
    );
    let f32 = ElemType::Float(FloatKind::F32);
    for (name, dtype, _) in types() {
        for width in [64, 96, 128] {
            let vector = 4;
            let [forward, backward] = typical(width, vector);
            instance!(
                list.other("attention/forward/{name}/{width}"), forward.units() as u32,
                attention_forward::AttentionForward
                [_ _ _ (given(true)) (given(true)) _ _ _ _] (vector, forward, false, dtype)
            );
            instance!(
                list.other("attention/delta/{name}/{width}"), UNITS,
                attention_delta::AttentionDelta [_ _ _ _ _ _]
                (vector, width / vector, UNITS, dtype)
            );
            let units = backward.units() as u32;
            instance!(
                list.other("attention/queries/{name}/{width}"), units,
                attention_queries::AttentionQueries
                [_ _ _ _ _ _ (given(true)) _ _ _ _] (vector, backward, dtype)
            );
            for (form, add, sums) in [("", false, dtype), ("-added", true, f32)] {
                instance!(
                    list.other("attention/keys{form}/{name}/{width}"), units,
                    attention_keys::AttentionKeys [_ _ _ _ _ _ (given(true)) _ _ _ _ _]
                    (vector, backward, [add; 2], [dtype, sums])
                );
            }
        }
    }
    super::mma::aot_instances(list);
    crate::attention::merge::kernel::aot_instances(list);
}
