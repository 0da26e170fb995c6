//! AOT instances with the sizes of a large model.

use super::elements::{backward_kernel, forward_kernel};
use super::formula::ActivationVariant;
use super::launch::ElementwiseLaunch;
use super::sums::{SUM_UNITS, SumTiling, sums_kernel};
use crate::activation::kind::Activation;
use crate::cube::instance::{AotList, given, instance, sequence, types};
use crate::cube::{Elementwise, SPLITS};

/// The width of the output.
const WIDTH: usize = 4096;

/// Adds every kernel of the activations, in every type.
pub(crate) fn aot_instances(list: &mut AotList) {
    for (name, dtype, vector) in types() {
        let columns = WIDTH / vector;
        for kind in [
            Activation::Gelu,
            Activation::GeluTanh,
            Activation::QuickGelu,
            Activation::SquaredRelu,
            Activation::SwiGlu,
            Activation::GeGlu,
            Activation::QuickGeGlu,
        ] {
            let variant = ActivationVariant {
                curve: kind.curve(),
                gated: kind.is_gated(),
                clamped: kind == Activation::QuickGeGlu,
                shifted: kind == Activation::QuickGeGlu,
            };
            // The splits differ in the same way for all kinds.
            let splits = match kind {
                Activation::SwiGlu => &SPLITS[..],
                _ => &[ElementwiseLaunch::STATIC],
            };
            for split in splits.iter().copied() {
                instance!(
                    list.streaming("activation/forward/{name}/{kind:?}-{WIDTH}-{split}"), split.units,
                    forward_kernel::ForwardKernel [_ (given(true)) (given(true)) _ _ _ _]
                    (vector, columns, variant, split, dtype)
                );
                instance!(
                    list.streaming("activation/backward/{name}/{kind:?}-{WIDTH}-{split}"), split.units,
                    backward_kernel::BackwardKernel [_ (given(false)) (given(false)) _ _ _ _ _]
                    (vector, columns, variant, split, dtype)
                );
            }
            for [bias, weight] in [[true, false], [false, true], [true, true]] {
                let tiling = SumTiling {
                    columns,
                    tile: if bias { SUM_UNITS as usize } else { columns },
                    units: SUM_UNITS,
                    planes: true,
                };
                instance!(
                    list.streaming(
                        "activation/sums/{name}/{kind:?}-{WIDTH}-bias-{bias}-weight-{weight}"
                    ),
                    SUM_UNITS, sums_kernel::SumsKernel
                    [_ (given(bias)) (given(weight)) _ (sequence(1)) (sequence(bias.into()))
                    (sequence(weight.into())) _ _ _ _]
                    (vector, tiling, variant, dtype)
                );
            }
        }
    }
}
