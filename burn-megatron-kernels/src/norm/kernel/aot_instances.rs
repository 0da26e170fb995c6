//! AOT instances of the norms.

use cubecl::ir::{ElemType, FloatKind};

use super::backward::{NormBackwardVariant, norm_backward, norm_partials};
use super::forward::{NormVariant, norm_forward};
use super::layout::RowLayout;
use super::{BACKWARD, BACKWARD_WITH_X_BIAS, FORWARD, PARTIAL_UNITS};
use crate::cube::instance::{AotInstance, AotTarget, kernel, types};

/// Every kernel in every type: LayerNorm with a residual and a bias, on narrow rows, on rows that
/// stay in registers and on rows that are read twice; with a bias of `x` too, on the widest rows that a
/// plane and a cube keep in registers.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = Vec::new();
    for (name, dtype, vector) in types() {
        for width in [128, 4096, 131_072] {
            let name = format!("{name}/{width}");
            all.extend(of_width(target, &name, [dtype; 3], vector, width));
        }
        for width in [128 * vector, 1024 * vector] {
            let name = format!("{name}/{width}+bias");
            all.extend(with_x_bias(target, &name, [dtype; 3], vector, width));
        }
        let wide = ElemType::Float(FloatKind::F32);
        let mixed = [dtype, wide, wide];
        if dtype != wide {
            let name = format!("{name}+f32/4096");
            all.extend(of_width(target, &name, mixed, vector, 4096));
            let name = format!("{name}+bias");
            all.extend(with_x_bias(target, &name, mixed, vector, 4096));
        }
    }
    all
}

const FORWARD_VARIANT: NormVariant = NormVariant {
    centred: true,
    zero_centered: true,
    add: true,
    bias: true,
    x_bias: false,
};
const BACKWARD_VARIANT: NormBackwardVariant = NormBackwardVariant {
    centred: true,
    zero_centered: true,
    input: true,
    onto: true,
    weight: true,
    bias: true,
    x_bias: false,
};

fn of_width(
    target: &AotTarget,
    name: &str,
    types: [ElemType; 3],
    vector: usize,
    width: usize,
) -> Vec<AotInstance> {
    let columns = width / vector;
    let partials = kernel!(
        target, PARTIAL_UNITS, norm_partials::NormPartials
        [_ _ _ _ _ _]
        (vector, BACKWARD_VARIANT, columns, PARTIAL_UNITS, [types[0], types[1]])
    );
    vec![
        forward(target, name, types, (vector, columns), FORWARD_VARIANT),
        backward(target, name, types, (vector, columns), BACKWARD_VARIANT),
        AotInstance::streaming(format!("norm/partials/{name}"), partials),
    ]
}

fn with_x_bias(
    target: &AotTarget,
    name: &str,
    types: [ElemType; 3],
    vector: usize,
    width: usize,
) -> [AotInstance; 2] {
    let forward_variant = NormVariant {
        x_bias: true,
        ..FORWARD_VARIANT
    };
    let backward_variant = NormBackwardVariant {
        x_bias: true,
        ..BACKWARD_VARIANT
    };
    let row = (vector, width / vector);
    [
        forward(target, name, types, row, forward_variant),
        backward(target, name, types, row, backward_variant),
    ]
}

fn forward(
    target: &AotTarget,
    name: &str,
    [x, sum, weight]: [ElemType; 3],
    (vector, columns): (usize, usize),
    variant: NormVariant,
) -> AotInstance {
    let layout = RowLayout::of(columns, true, 32, FORWARD.units, FORWARD);
    let kernel = kernel!(
        target, layout.units, norm_forward::NormForward
        [_ _ _ _ _ _ _ _ _ _]
        (vector, variant, layout, [x, sum, weight, weight])
    );
    AotInstance::streaming(format!("norm/forward/{name}"), kernel)
}

fn backward(
    target: &AotTarget,
    name: &str,
    types: [ElemType; 3],
    (vector, columns): (usize, usize),
    variant: NormBackwardVariant,
) -> AotInstance {
    let budget = if variant.x_bias {
        BACKWARD_WITH_X_BIAS
    } else {
        BACKWARD
    };
    let layout = RowLayout::of(columns, true, 32, budget.units, budget);
    let kernel = kernel!(
        target, layout.units, norm_backward::NormBackward
        [_ _ _ _ _ _ _ _ _]
        (vector, variant, layout, types)
    );
    AotInstance::streaming(format!("norm/backward/{name}"), kernel)
}
