//! AOT instances of the quantizers.

use super::super::scaling::{QuantizerUsage, ScalingKind};
use super::copies::quantize_kernel;
use super::plan::QuantizePlan;
use super::reduce::{FinishVariant, finish_kernel, scale_kernel};
use super::values::{DequantizeVariant, amax_kernel, dequantize_kernel};
use crate::activation::Activation;
use crate::activation::kernel::ActivationVariant;
use crate::cube::instance::{AotList, given, instance, types};
use crate::fp8::format::Format;
use crate::fp8::kernel::tile::UNITS;

const KINDS: [(&str, ScalingKind); 5] = [
    ("tensor", ScalingKind::Tensor),
    ("mx", ScalingKind::Mx),
    ("1x128", blocks(false, true)),
    ("128x128", blocks(true, true)),
    ("1x128-f32", blocks(false, false)),
];

const fn blocks(square: bool, power_of_two: bool) -> ScalingKind {
    ScalingKind::Blocks {
        square,
        power_of_two,
    }
}

/// Returns the inputs of the instances: matrices with every scaling method, and activations with two scaling methods.
fn sources() -> Vec<(&'static str, ScalingKind, Option<Activation>)> {
    let stored = KINDS.map(|(name, kind)| (name, kind, None));
    let activation = |activation| {
        let kinds = KINDS[..2].iter();
        kinds.map(move |(name, kind)| (*name, *kind, Some(activation)))
    };
    let activations = [Activation::GeluTanh, Activation::SwiGlu];
    let computed = activations.into_iter().flat_map(activation);
    stored.into_iter().chain(computed).collect()
}

/// Adds AOT instances that compute both copies with every scaling method and in every type. Also adds the kernels for
/// the largest magnitude and for dequantization.
pub(crate) fn aot_instances(list: &mut AotList) {
    for (name, dtype, vector) in types() {
        for (scaling, kind, activation) in sources() {
            let plan = QuantizePlan {
                kind,
                format: Format::E4M3,
                usage: QuantizerUsage::BOTH,
                activation: activation.map(ActivationVariant::plain),
                vector,
                planes: true,
                plane: 32,
                flushes: false,
                unrolled: true,
            };
            let source = activation.map_or(String::new(), |activation| format!("{activation:?}/"));
            instance!(
                list.streaming("fp8/quantize/{source}{scaling}/{name}"), UNITS,
                quantize_kernel::QuantizeKernel
                [_ (given(activation.is_some())) _ _ _ _ _ _ _ _ _]
                (vector, plan.patch() / 4, 4, plan, dtype)
            );
        }
        instance!(
            list.streaming("fp8/amax/{name}"), UNITS,
            amax_kernel::AmaxKernel [_ _ _] (vector, true, dtype)
        );
    }
    // There is one word of codes per 128 bits of values.
    for (scaling, kind) in KINDS {
        let reading = DequantizeVariant {
            kind,
            format: Format::E4M3,
            flushes: false,
        };
        instance!(
            list.other("fp8/dequantize/{scaling}"), UNITS,
            dequantize_kernel::DequantizeKernel [_ _ _ _ _] (4, reading, 4)
        );
    }
    let finish = FinishVariant {
        counts: true,
        logged: true,
        descale: true,
        planes: true,
    };
    instance!(
        list.other("fp8/finish"), UNITS,
        finish_kernel::FinishKernel [_ _ _ _ _ _ _ _] (finish)
    );
    instance!(
        list.other("fp8/scale"), 1,
        scale_kernel::ScaleKernel [_ _ _] (false, Format::E4M3)
    );
}
