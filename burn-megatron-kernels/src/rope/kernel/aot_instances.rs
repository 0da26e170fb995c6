//! AOT instances of rotary positions.

use cubecl::ir::ElemType;

use super::mla::{in_vectors, mla_backward_kernel, mla_forward_kernel};
use super::rotate::rotate_kernel;
use super::{RopePlan, UNITS};
use crate::cube::SPLITS;
use crate::cube::instance::{AotInstance, AotTarget, given, kernel, types};
use crate::rope::{MlaDims, Pairing, RotaryHeads};

/// Grouped heads of 128 features, and DeepSeek's latent attention.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut instances = vec![];
    for dtype in types() {
        for pairing in [Pairing::Halves, Pairing::Interleaved] {
            instances.extend(rotate_instances(target, dtype, pairing));
            instances.extend(mla_instances(target, dtype, pairing));
        }
    }
    instances
}

type Type = (&'static str, ElemType, usize);

/// 32 queries and 8 keys are rotated, 8 values are copied; in place in every split, and with one
/// position per token.
fn rotate_instances(
    target: &AotTarget,
    (name, dtype, vector): Type,
    pairing: Pairing,
) -> Vec<AotInstance> {
    let heads = RotaryHeads {
        heads: 48,
        features: 128,
        rotated: 40,
        first: 0,
        width: 128,
        pairing,
    };
    let plan = RopePlan::with_vector(heads, vector);
    let rotate = |plan: RopePlan, each, items, units| {
        kernel!(
            target, units, rotate_kernel::RotateKernel
            [_ _ _ (each) _ _ _ _ _ _]
            (plan.vector, plan.lanes, plan, items, units, dtype)
        )
    };
    let each = rotate(
        plan,
        given(true),
        plan.rotated_units() + plan.unrotated_vectors(),
        UNITS,
    );
    let each = AotInstance::streaming(format!("rope/each/{name}/{pairing:?}"), each);
    let in_place = SPLITS.map(|split| {
        let plan = plan.grouped(split.each);
        let kernel = rotate(plan, given(false), plan.rotated_units(), split.units);
        AotInstance::streaming(format!("rope/in_place/{name}/{pairing:?}-{split}"), kernel)
    });
    core::iter::once(each).chain(in_place).collect()
}

/// 128 heads of 128 and 64 features, and of 128 of a value.
fn mla_instances(
    target: &AotTarget,
    (name, dtype, vector): Type,
    pairing: Pairing,
) -> [AotInstance; 2] {
    let heads = RotaryHeads {
        heads: 128,
        features: 192,
        rotated: 128,
        first: 128,
        width: 64,
        pairing,
    };
    let plan = RopePlan::with_vector(heads, vector);
    let mla = MlaDims {
        nope: 128,
        value: 128,
    };
    let mla = in_vectors(mla, plan);
    let keys = kernel!(
        target, UNITS, mla_forward_kernel::MlaForwardKernel
        [_ _ _ _ _ (given(false)) _ _ _ _ _ _ _]
        (plan.vector, plan.lanes, plan, mla, plan.rotated_units(), dtype)
    );
    let back = kernel!(
        target, UNITS, mla_backward_kernel::MlaBackwardKernel
        [_ _ _ (given(false)) _ _ _ _ _ _ _]
        (plan.vector, plan.lanes, plan, mla, dtype)
    );
    [
        AotInstance::streaming(format!("rope/keys/{name}/{pairing:?}"), keys),
        AotInstance::streaming(format!("rope/keys_back/{name}/{pairing:?}"), back),
    ]
}
