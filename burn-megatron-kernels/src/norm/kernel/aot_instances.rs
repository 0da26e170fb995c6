//! AOT instances of the norms.

use cubecl::ir::{ElemType, FloatKind};

use super::backward::{
    FINISH_UNITS, NormBackwardVariant, norm_backward, norm_finish, norm_partials,
};
use super::forward::{NormVariant, norm_forward};
use super::layout::RowLayout;
use super::{BACKWARD, FORWARD, PARTIAL_UNITS};
use crate::cube::instance::{AotInstance, AotTarget, tensor, types};

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
        let (device, compiler) = target.properties();
        all.push(AotInstance::other(
            format!("norm/finish/{name}/4096"),
            norm_finish::NormFinish::new(
                target.settings(FINISH_UNITS),
                device,
                compiler,
                tensor(),
                tensor(),
                tensor(),
                (),
                (),
                0,
                2,
                FINISH_UNITS,
                dtype,
            ),
        ));
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
    let (device, compiler) = target.properties();
    let forward = norm_forward::NormForward::new(
        target.settings(layout.units),
        device,
        compiler,
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        (),
        (),
        vector,
        forward_variant,
        layout,
        types,
    );
    let layout = RowLayout::of(columns, true, 32, BACKWARD.units, BACKWARD);
    let (device, compiler) = target.properties();
    let backward = norm_backward::NormBackward::new(
        target.settings(layout.units),
        device,
        compiler,
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        (),
        (),
        vector,
        backward_variant,
        layout,
        types,
    );
    let (device, compiler) = target.properties();
    let partials = norm_partials::NormPartials::new(
        target.settings(PARTIAL_UNITS),
        device,
        compiler,
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        (),
        (),
        vector,
        backward_variant,
        columns,
        PARTIAL_UNITS,
        [types[0], types[1]],
    );
    vec![
        AotInstance::streaming(format!("norm/forward/{name}"), forward),
        AotInstance::streaming(format!("norm/backward/{name}"), backward),
        AotInstance::streaming(format!("norm/partials/{name}"), partials),
    ]
}
