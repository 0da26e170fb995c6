//! AOT instances with the sizes of a large model.

use cubecl::ir::{ElemType, FloatKind};

use super::forward::mma_forward::MmaForward;
use super::keys::mma_keys::MmaKeys;
use super::plan::shapes;
use super::queries::mma_queries::MmaQueries;
use crate::cube::instance::{AotList, given, instance};
use crate::cube::mma::{CHUNK, PAIR};

/// The widths of heads of keys and values.
const WIDTHS: [[usize; 2]; 6] = [
    [64, 64],
    [96, 96],
    [128, 128],
    [192, 128],
    [192, 192],
    [256, 256],
];

/// Adds every kernel in both types, with all optional inputs.
pub(in crate::attention::kernel) fn aot_instances(list: &mut AotList) {
    let f32 = ElemType::Float(FloatKind::F32);
    for (name, kind) in [("f16", FloatKind::F16), ("bf16", FloatKind::BF16)] {
        for [width, values] in WIDTHS {
            let dtype = ElemType::Float(kind);
            let plan = shapes(width, values, kind == FloatKind::BF16);
            // A single width shows that the variant with the largest scores compiles.
            let forms = [("", false), ("-max", true)];
            let count = if [width, values] == [128, 128] { 2 } else { 1 };
            for (form, with_max) in forms.into_iter().take(count) {
                instance!(
                    list.multiplying("attention/mma-forward{form}/{name}/{width}-{values}"),
                    plan.forward.units() as u32,
                    MmaForward [_ _ _ (given(true)) (given(true)) _ _ _ _]
                    (CHUNK, plan.forward, with_max, dtype)
                );
            }
            instance!(
                list.multiplying("attention/mma-queries/{name}/{width}-{values}"),
                plan.queries.units() as u32,
                MmaQueries [_ _ _ _ _ _ (given(true)) _ _ _ _] (CHUNK, plan.queries, dtype)
            );
            for keys in plan.keys {
                let part = match (keys.sums_keys, keys.sums_values) {
                    (true, true) => "",
                    (true, false) => "-dk",
                    (false, _) => "-dv",
                };
                for (form, flat, vector, sums) in
                    [("", false, CHUNK, dtype), ("-added", true, PAIR, f32)]
                {
                    instance!(
                        list.multiplying("attention/mma-keys{part}{form}/{name}/{width}-{values}"),
                        keys.units() as u32,
                        MmaKeys [_ _ _ _ _ _ (given(true)) _ _ _ _ _]
                        (CHUNK, vector, keys, flat, [flat; 2], [dtype, sums])
                    );
                }
            }
        }
    }
}
