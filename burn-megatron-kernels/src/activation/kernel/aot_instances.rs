//! AOT instances with the sizes of a large model.

use cubecl::ir::ElemType;

use super::elements::{backward_kernel, forward_kernel};
use super::formula::ActivationVariant;
use super::launch::ElementwiseLaunch;
use super::sums::{SUM_UNITS, SumTiling, sums_kernel};
use crate::activation::kind::Activation;
use crate::cube::instance::{AotInstance, AotTarget, given, kernel, sequence, types};
use crate::cube::{Elementwise, SPLITS, Split};

/// Width of the output.
const WIDTH: usize = 4096;

/// The AOT instances of the activations.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = Vec::new();
    for (name, dtype, vector) in types() {
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
            let kernel = InstanceVariant {
                variant,
                dtype,
                vector,
            };
            let called = |kernel| format!("activation/{kernel}/{name}/{kind:?}-{WIDTH}");
            // The splits differ alike in all kinds.
            let splits = match kind {
                Activation::SwiGlu => &SPLITS[..],
                _ => &[ElementwiseLaunch::STATIC],
            };
            for split in splits {
                let called = |kernel| format!("{}-{split}", called(kernel));
                all.push(kernel.forward(target, called("forward"), *split));
                all.push(kernel.backward(target, called("backward"), *split));
            }
            for [bias, weight] in [[true, false], [false, true], [true, true]] {
                let name = format!("{}-bias-{bias}-weight-{weight}", called("sums"));
                all.push(kernel.sums(target, name, bias, weight));
            }
        }
    }
    all
}

/// One form of the kernels.
struct InstanceVariant {
    variant: ActivationVariant,
    dtype: ElemType,
    vector: usize,
}

impl InstanceVariant {
    fn columns(&self) -> usize {
        WIDTH / self.vector
    }

    fn forward(&self, target: &AotTarget, name: String, split: Split) -> AotInstance {
        let kernel = kernel!(
            target, split.units, forward_kernel::ForwardKernel
            [_ (given(true)) (given(true)) _ _ _ _]
            (self.vector, self.columns(), self.variant, split, self.dtype)
        );
        AotInstance::streaming(name, kernel)
    }

    fn backward(&self, target: &AotTarget, name: String, split: Split) -> AotInstance {
        let kernel = kernel!(
            target, split.units, backward_kernel::BackwardKernel
            [_ (given(false)) (given(false)) _ _ _ _ _]
            (self.vector, self.columns(), self.variant, split, self.dtype)
        );
        AotInstance::streaming(name, kernel)
    }

    fn sums(&self, target: &AotTarget, name: String, bias: bool, weight: bool) -> AotInstance {
        let columns = self.columns();
        let tiling = SumTiling {
            columns,
            tile: if bias { SUM_UNITS as usize } else { columns },
            units: SUM_UNITS,
            planes: true,
        };
        let kernel = kernel!(
            target, SUM_UNITS, sums_kernel::SumsKernel
            [_ (given(bias)) (given(weight)) _ (sequence(1)) (sequence(bias.into()))
            (sequence(weight.into())) _ _ _ _]
            (self.vector, tiling, self.variant, self.dtype)
        );
        AotInstance::streaming(name, kernel)
    }
}
