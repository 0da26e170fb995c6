//! AOT instances of the norms.

use cubecl::ir::{ElemType, FloatKind};

use super::backward::{NormBackwardVariant, norm_backward, norm_partials};
use super::forward::{NormVariant, norm_forward};
use super::layout::RowLayout;
use super::{BACKWARD, BACKWARD_WITH_X_BIAS, FORWARD, PARTIAL_UNITS};
use crate::cube::instance::{AotList, instance, types};

/// Adds every kernel in every type.
///
/// LayerNorm has a residual and a bias. Its instances have narrow rows, rows that stay in registers, and rows that are
/// read twice. Instances with a bias of `x` have the widest rows that a plane or a cube can keep in registers.
pub(crate) fn aot_instances(list: &mut AotList) {
    let single = ElemType::Float(FloatKind::F32);
    for (name, dtype, vector) in types() {
        for width in [128, 4096, 131_072] {
            rows(list, name, [dtype; 2], (vector, width), false);
        }
        for width in [128 * vector, 1024 * vector] {
            rows(list, name, [dtype; 2], (vector, width), true);
        }
        if dtype != single {
            for x_bias in [false, true] {
                let name = format!("{name}+f32");
                rows(list, &name, [dtype, single], (vector, 4096), x_bias);
            }
        }
    }
}

/// Adds the kernels for rows of `width` elements. `x` and the tensor to which it is added have these types.
fn rows(
    list: &mut AotList,
    name: &str,
    [x, sum]: [ElemType; 2],
    (vector, width): (usize, usize),
    x_bias: bool,
) {
    let columns = width / vector;
    let label = format!("{name}/{width}{}", if x_bias { "+bias" } else { "" });
    let variant = NormVariant {
        centred: true,
        zero_centered: true,
        add: true,
        bias: true,
        x_bias,
    };
    let layout = RowLayout::of(columns, true, 32, FORWARD.units, FORWARD);
    instance!(
        list.streaming("norm/forward/{label}"), layout.units,
        norm_forward::NormForward [_ _ _ _ _ _ _ _ _ _]
        (vector, variant, layout, [x, sum, sum, sum])
    );
    let variant = NormBackwardVariant {
        centred: true,
        zero_centered: true,
        input: true,
        onto: true,
        weight: true,
        bias: true,
        x_bias,
    };
    let budget = if x_bias {
        BACKWARD_WITH_X_BIAS
    } else {
        BACKWARD
    };
    let layout = RowLayout::of(columns, true, 32, budget.units, budget);
    instance!(
        list.streaming("norm/backward/{label}"), layout.units,
        norm_backward::NormBackward [_ _ _ _ _ _ _ _ _] (vector, variant, layout, [x, sum, sum])
    );
    if !x_bias {
        instance!(
            list.streaming("norm/partials/{label}"), PARTIAL_UNITS,
            norm_partials::NormPartials [_ _ _ _ _ _]
            (vector, variant, columns, PARTIAL_UNITS, [x, sum])
        );
    }
}
