//! AOT instances with the sizes of a large model.

use cubecl::ir::{ElemType, FloatKind};

use super::forward::mma_forward::MmaForward;
use super::keys::mma_keys::MmaKeys;
use super::plan::shapes;
use super::queries::mma_queries::MmaQueries;
use crate::cube::instance::{AotInstance, AotTarget, given, kernel};
use crate::cube::mma::{CHUNK, PAIR};

/// Widths of heads of keys and of values.
const WIDTHS: [[usize; 2]; 6] = [
    [64, 64],
    [96, 96],
    [128, 128],
    [192, 128],
    [192, 192],
    [256, 256],
];

/// Every kernel in both types, with all that a problem may ask for.
pub(in crate::attention::kernel) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = Vec::new();
    let f32 = ElemType::Float(FloatKind::F32);
    for (name, kind) in [("f16", FloatKind::F16), ("bf16", FloatKind::BF16)] {
        for [width, values] in WIDTHS {
            let dtype = ElemType::Float(kind);
            let label = |kernel: &str| format!("attention/mma-{kernel}/{name}/{width}-{values}");
            let plan = shapes(width, values, kind == FloatKind::BF16);
            for (name, with_max) in [("forward", false), ("forward-max", true)] {
                let kernel = kernel!(
                    target, plan.forward.units() as u32, MmaForward
                    [_ _ _ (given(true)) (given(true)) _ _ _ _]
                    (CHUNK, plan.forward, with_max, dtype)
                );
                // One width shows that the largest scores compile.
                if !with_max || [width, values] == [128, 128] {
                    all.push(AotInstance::multiplying(label(name), kernel));
                }
            }
            let kernel = kernel!(
                target, plan.queries.units() as u32, MmaQueries
                [_ _ _ _ _ _ (given(true)) _ _ _ _]
                (CHUNK, plan.queries, dtype)
            );
            all.push(AotInstance::multiplying(label("queries"), kernel));
            for keys in plan.keys {
                let part = match (keys.sums_keys, keys.sums_values) {
                    (true, true) => "",
                    (true, false) => "-dk",
                    (false, _) => "-dv",
                };
                for (form, flat, vector, sums) in
                    [("", false, CHUNK, dtype), ("-added", true, PAIR, f32)]
                {
                    let kernel = kernel!(
                        target, keys.units() as u32, MmaKeys
                        [_ _ _ _ _ _ (given(true)) _ _ _ _ _]
                        (CHUNK, vector, keys, flat, [flat; 2], [dtype, sums])
                    );
                    all.push(AotInstance::multiplying(
                        label(&format!("keys{part}{form}")),
                        kernel,
                    ));
                }
            }
        }
    }
    all
}
