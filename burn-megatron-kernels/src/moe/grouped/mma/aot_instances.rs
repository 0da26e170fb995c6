//! AOT instances. Sizes are arguments, so that an instance serves all models.

use cubecl::ir::{ElemType, FloatKind};

use super::plan::{Factors, UNITS};
use super::product::grouped_product::GroupedProduct;
use super::weight_gradient::grouped_weight_gradient::GroupedWeightGradient;
use crate::cube::instance::{AotInstance, AotTarget, kernel};
use crate::cube::mma::{CHUNK, PAIR};

/// Every kernel in both types; gradients at aligned places and at others.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = vec![];
    for (name, kind) in [("f16", FloatKind::F16), ("bf16", FloatKind::BF16)] {
        let (dtype, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        for (form, transposed) in [("", false), ("-transposed", true)] {
            let kernel = kernel!(
                target, UNITS as u32, GroupedProduct
                [_ _ _ _ _ _ _ _ _ _]
                (CHUNK, Factors::of_product(transposed, bf16), dtype)
            );
            let name = format!("moe/grouped-product{form}/{name}");
            all.push(AotInstance::multiplying(name, kernel));
        }
        for (form, vector, add) in [("", PAIR, false), ("-added", PAIR, true), ("-odd", 1, true)] {
            let kernel = kernel!(
                target, UNITS as u32, GroupedWeightGradient
                [_ _ _ _ _ _ _ _]
                (CHUNK, vector, add, Factors::of_weight_gradient(bf16), dtype)
            );
            let name = format!("moe/grouped-weight-gradient{form}/{name}");
            all.push(AotInstance::multiplying(name, kernel));
        }
    }
    all
}
