//! AOT instances. Sizes are runtime arguments, so that one instance serves all models.

use cubecl::ir::{ElemType, FloatKind};

use super::plan::{Factors, UNITS};
use super::product::grouped_product::GroupedProduct;
use super::weight_gradient::grouped_weight_gradient::GroupedWeightGradient;
use crate::cube::instance::{AotList, instance};
use crate::cube::mma::{CHUNK, PAIR};

/// Adds every kernel in both types. The weight gradients have aligned and unaligned places in the flat buffer.
pub(crate) fn aot_instances(list: &mut AotList) {
    for (name, kind) in [("f16", FloatKind::F16), ("bf16", FloatKind::BF16)] {
        let (dtype, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        for (form, transposed) in [("", false), ("-transposed", true)] {
            instance!(
                list.multiplying("moe/grouped-product{form}/{name}"), UNITS as u32,
                GroupedProduct [_ _ _ _ _ _ _ _ _ _]
                (CHUNK, Factors::of_product(transposed, bf16), dtype)
            );
        }
        for (form, vector, add) in [("", PAIR, false), ("-added", PAIR, true), ("-odd", 1, true)] {
            instance!(
                list.multiplying("moe/grouped-weight-gradient{form}/{name}"), UNITS as u32,
                GroupedWeightGradient [_ _ _ _ _ _ _ _]
                (CHUNK, vector, add, Factors::of_weight_gradient(bf16), dtype)
            );
        }
    }
}
