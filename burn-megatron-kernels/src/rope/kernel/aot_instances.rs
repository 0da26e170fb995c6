//! AOT instances of rotary position embedding.

use cubecl::ir::ElemType;

use super::mla::{in_vectors, mla_backward_kernel, mla_forward_kernel};
use super::rotate::rotate_kernel;
use super::{RopePlan, UNITS};
use crate::cube::SPLITS;
use crate::cube::instance::{AotList, given, instance, types};
use crate::rope::{MlaDims, Pairing, RotaryHeads};

/// Adds instances for grouped-query attention with heads of 128 features, and for DeepSeek's latent attention.
pub(crate) fn aot_instances(list: &mut AotList) {
    for dtype in types() {
        for pairing in [Pairing::Halves, Pairing::Interleaved] {
            rotate_instances(list, dtype, pairing);
            mla_instances(list, dtype, pairing);
        }
    }
}

type Type = (&'static str, ElemType, usize);

/// Adds instances that rotate 32 query heads and 8 key heads, and copy 8 value heads. They rotate in place with every
/// split, and with one position per token.
fn rotate_instances(list: &mut AotList, (name, dtype, vector): Type, pairing: Pairing) {
    let heads = RotaryHeads {
        heads: 48,
        features: 128,
        rotated: 40,
        first: 0,
        width: 128,
        pairing,
    };
    let plan = RopePlan::with_vector(heads, vector);
    let items = plan.rotated_units() + plan.unrotated_vectors();
    instance!(
        list.streaming("rope/each/{name}/{pairing:?}"), UNITS,
        rotate_kernel::RotateKernel [_ _ _ (given(true)) _ _]
        (plan.vector, plan.lanes, plan, items, UNITS, dtype)
    );
    for split in SPLITS {
        let plan = plan.grouped(split.each);
        instance!(
            list.streaming("rope/in_place/{name}/{pairing:?}-{split}"), split.units,
            rotate_kernel::RotateKernel [_ _ _ (given(false)) _ _]
            (plan.vector, plan.lanes, plan, plan.rotated_units(), split.units, dtype)
        );
    }
}

/// Adds instances with 128 heads. The parts of a key have 128 and 64 features, and values have 128 features.
fn mla_instances(list: &mut AotList, (name, dtype, vector): Type, pairing: Pairing) {
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
    instance!(
        list.streaming("rope/keys/{name}/{pairing:?}"), UNITS,
        mla_forward_kernel::MlaForwardKernel [_ _ _ _ _ (given(false)) _ _ _]
        (plan.vector, plan.lanes, plan, mla, plan.rotated_units(), dtype)
    );
    instance!(
        list.streaming("rope/keys_back/{name}/{pairing:?}"), UNITS,
        mla_backward_kernel::MlaBackwardKernel [_ _ _ (given(false)) _ _ _]
        (plan.vector, plan.lanes, plan, mla, dtype)
    );
}
