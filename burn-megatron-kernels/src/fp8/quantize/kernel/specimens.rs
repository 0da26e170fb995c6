//! The kernels of the quantisers as values.

use super::super::Ways;
use super::super::launched::Kind;
use super::copies::quantize_kernel;
use super::plan::Plan;
use super::reduce::{Finish, UNITS, finish_kernel, scale_kernel};
use super::values::{Reading, amax_kernel, dequantize_kernel};
use crate::cube::specimen::{Specimen, Target, buffer, types};
use crate::fp8::Format;

const KINDS: [(&str, Kind); 5] = [
    ("tensor", Kind::Tensor),
    ("mx", Kind::Mx),
    ("1x128", blocks(false, true)),
    ("128x128", blocks(true, true)),
    ("1x128-f32", blocks(false, false)),
];

const fn blocks(square: bool, power_of_two: bool) -> Kind {
    Kind::Blocks {
        square,
        power_of_two,
    }
}

/// Both copies by every way of scaling and in every type; largest magnitudes; values.
pub(crate) fn specimens(target: &Target) -> Vec<Specimen> {
    let mut all = vec![];
    for (name, dtype, vector) in types() {
        for (scaling, kind) in KINDS {
            let plan = Plan {
                kind,
                format: Format::E4M3,
                ways: Ways::BOTH,
                vector,
                planes: true,
                plane: 32,
                flushes: false,
                unrolled: true,
            };
            let (device, compiler) = target.properties();
            let kernel = quantize_kernel::QuantizeKernel::new(
                target.settings(UNITS),
                device,
                compiler,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                vector,
                plan.patch() / 4,
                4,
                plan,
                dtype,
            );
            let name = format!("fp8/quantize/{scaling}/{name}");
            all.push(Specimen::streaming(name, kernel));
        }
        let (device, compiler) = target.properties();
        let settings = target.settings(UNITS);
        let amax = amax_kernel::AmaxKernel::new(
            settings,
            device,
            compiler,
            buffer(),
            buffer(),
            (),
            vector,
            true,
            dtype,
        );
        all.push(Specimen::streaming(format!("fp8/amax/{name}"), amax));
    }
    // A word of codes for 128 bits of values.
    for (scaling, kind) in KINDS {
        let reading = Reading {
            kind,
            format: Format::E4M3,
            flushes: false,
        };
        let (device, compiler) = target.properties();
        let kernel = dequantize_kernel::DequantizeKernel::new(
            target.settings(UNITS),
            device,
            compiler,
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            4,
            reading,
            4,
        );
        all.push(Specimen::other(format!("fp8/dequantize/{scaling}"), kernel));
    }
    all.extend(small(target));
    all.extend(crate::fp8::matrix::kernel::specimens(target));
    all
}

/// What runs in one cube.
fn small(target: &Target) -> [Specimen; 2] {
    let finish = Finish {
        counts: true,
        descale: true,
        planes: true,
    };
    let (device, compiler) = target.properties();
    let finish = finish_kernel::FinishKernel::new(
        target.settings(UNITS),
        device,
        compiler,
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        (),
        finish,
    );
    let (device, compiler) = target.properties();
    let scale = scale_kernel::ScaleKernel::new(
        target.settings(1),
        device,
        compiler,
        buffer(),
        buffer(),
        (),
        false,
        Format::E4M3,
    );
    [
        Specimen::other("fp8/finish".into(), finish),
        Specimen::other("fp8/scale".into(), scale),
    ]
}
