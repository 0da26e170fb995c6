//! The kernels at the sizes of a large model.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::elements::{backward_kernel, forward_kernel};
use super::formula::Form;
use super::launched::Elements;
use super::sums::{Cut, FOLD_PARTS, FOLD_SUMS, SUM_UNITS, fold_kernel, sums_kernel};
use crate::activation::Activation;
use crate::cube::specimen::{Specimen, Target, tensor, types};
use crate::cube::{Elementwise, SPLITS, Split};

/// Width of the output.
const WIDTH: usize = 4096;

/// Every kernel of the activations.
pub(crate) fn specimens(target: &Target) -> Vec<Specimen> {
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
            let form = Form {
                curve: kind.curve(),
                gated: kind.is_gated(),
                clamped: kind == Activation::QuickGeGlu,
            };
            let kernel = Described {
                form,
                dtype,
                vector,
            };
            let called = |kernel| format!("activation/{kernel}/{name}/{kind:?}-{WIDTH}");
            // The splits differ alike in all kinds.
            let splits = match kind {
                Activation::SwiGlu => &SPLITS[..],
                _ => &[Elements::STATIC],
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
        all.push(fold(target, format!("activation/fold/{name}"), dtype));
    }
    all
}

/// One form of the kernels.
struct Described {
    form: Form,
    dtype: ElemType,
    vector: usize,
}

impl Described {
    fn columns(&self) -> usize {
        WIDTH / self.vector
    }

    fn forward(&self, target: &Target, name: String, split: Split) -> Specimen {
        let (device, compiler) = target.properties();
        let kernel = forward_kernel::ForwardKernel::new(
            target.settings(split.units),
            device,
            compiler,
            tensor(),
            ComptimeOptionCompilationArg::Some(tensor()),
            ComptimeOptionCompilationArg::Some(tensor()),
            tensor(),
            (),
            (),
            (),
            self.vector,
            self.columns(),
            self.form,
            split,
            self.dtype,
        );
        Specimen::streaming(name, kernel)
    }

    fn backward(&self, target: &Target, name: String, split: Split) -> Specimen {
        let (device, compiler) = target.properties();
        let kernel = backward_kernel::BackwardKernel::new(
            target.settings(split.units),
            device,
            compiler,
            tensor(),
            ComptimeOptionCompilationArg::None,
            ComptimeOptionCompilationArg::None,
            tensor(),
            tensor(),
            (),
            (),
            (),
            self.vector,
            self.columns(),
            self.form,
            split,
            self.dtype,
        );
        Specimen::streaming(name, kernel)
    }

    fn sums(&self, target: &Target, name: String, bias: bool, weight: bool) -> Specimen {
        let (device, compiler) = target.properties();
        let columns = self.columns();
        let cut = Cut {
            columns,
            tile: if bias { SUM_UNITS as usize } else { columns },
            units: SUM_UNITS,
            planes: true,
        };
        let option = |given: bool| match given {
            true => ComptimeOptionCompilationArg::Some(tensor()),
            false => ComptimeOptionCompilationArg::None,
        };
        let kernel = sums_kernel::SumsKernel::new(
            target.settings(SUM_UNITS),
            device,
            compiler,
            tensor(),
            option(bias),
            match weight {
                true => ComptimeOptionCompilationArg::Some(tensor()),
                false => ComptimeOptionCompilationArg::None,
            },
            tensor(),
            [tensor()].into_iter().collect(),
            bias.then(tensor).into_iter().collect(),
            weight.then(tensor).into_iter().collect(),
            (),
            (),
            (),
            (),
            self.vector,
            cut,
            self.form,
            self.dtype,
        );
        Specimen::streaming(name, kernel)
    }
}

fn fold(target: &Target, name: String, dtype: ElemType) -> Specimen {
    let (device, compiler) = target.properties();
    let kernel = fold_kernel::FoldKernel::new(
        target.settings(FOLD_SUMS * FOLD_PARTS),
        device,
        compiler,
        tensor(),
        tensor(),
        (),
        (),
        (),
        (),
        dtype,
    );
    Specimen::other(name, kernel)
}
