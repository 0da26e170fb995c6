//! AOT instances of the norms.

use cubecl::ir::{ElemType, FloatKind};

use super::backward::{NormBackwardVariant, norm_backward, norm_partials};
use super::forward::{NormVariant, norm_forward};
use super::layout::RowLayout;
use super::{BACKWARD, FORWARD, PARTIAL_UNITS};
use crate::cube::instance::{AotInstance, AotTarget, kernel, types};

/// Every kernel in every type: LayerNorm with a residual and a bias, on narrow rows, on rows that
/// stay in registers and on rows that are read twice.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = Vec::new();
    for (name, dtype, vector) in types() {
        for width in [128, 4096, 131_072] {
            let name = format!("{name}/{width}");
            all.extend(of_width(target, &name, [dtype; 3], vector, width));
        }
        let wide = ElemType::Float(FloatKind::F32);
        let mixed = [dtype, wide, wide];
        if dtype != wide {
            let name = format!("{name}+f32/4096");
            all.extend(of_width(target, &name, mixed, vector, 4096));
        }
    }
    all
}

fn of_width(
    target: &AotTarget,
    name: &str,
    types: [ElemType; 3],
    vector: usize,
    width: usize,
) -> Vec<AotInstance> {
    let forward_variant = NormVariant {
        centred: true,
        zero_centered: true,
        add: true,
        bias: true,
    };
    let backward_variant = NormBackwardVariant {
        centred: true,
        zero_centered: true,
        input: true,
        onto: true,
        parameters: 2,
    };
    let columns = width / vector;
    let layout = RowLayout::of(columns, true, 32, FORWARD.units, FORWARD);
    let forward = kernel!(
        target, layout.units, norm_forward::NormForward
        [_ _ _ _ _ _ _ _ _]
        (vector, forward_variant, layout, types)
    );
    let layout = RowLayout::of(columns, true, 32, BACKWARD.units, BACKWARD);
    let backward = kernel!(
        target, layout.units, norm_backward::NormBackward
        [_ _ _ _ _ _ _ _ _]
        (vector, backward_variant, layout, types)
    );
    let partials = kernel!(
        target, PARTIAL_UNITS, norm_partials::NormPartials
        [_ _ _ _ _ _]
        (vector, backward_variant, columns, PARTIAL_UNITS, [types[0], types[1]])
    );
    vec![
        AotInstance::streaming(format!("norm/forward/{name}"), forward),
        AotInstance::streaming(format!("norm/backward/{name}"), backward),
        AotInstance::streaming(format!("norm/partials/{name}"), partials),
    ]
}
