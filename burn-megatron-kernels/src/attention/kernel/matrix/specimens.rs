//! The kernels as values, with the sizes of a large model.

use cubecl::ir::{ElemType, FloatKind};

use super::super::specimens::{given, reach, site};
use super::WIDEST;
use super::forward::matrix_forward::MatrixForward;
use super::keys::matrix_keys::MatrixKeys;
use super::plan::{Products, blocks};
use super::queries::matrix_queries::MatrixQueries;
use crate::cube::specimen::{Specimen, Target, buffer};

/// Every kernel in both types for heads of width 64, 96 and 128.
pub(in crate::attention::kernel) fn specimens(target: &Target) -> Vec<Specimen> {
    let mut all = Vec::new();
    for (name, kind) in [("f16", FloatKind::F16), ("bf16", FloatKind::BF16)] {
        for width in [64, 96, 128] {
            let dtype = ElemType::Float(kind);
            let label = |kernel: &str| format!("attention/matrix-{kernel}/{name}/{width}");
            let memory = target.device.hardware.max_shared_memory_size;
            let [forward, backward] = blocks(width, WIDEST, memory, Products::Units);
            let (device, compiler) = target.properties();
            let kernel = MatrixForward::new(
                target.settings(forward.units() as u32),
                device,
                compiler,
                buffer(),
                buffer(),
                buffer(),
                given(),
                given(),
                buffer(),
                buffer(),
                site(),
                site(),
                site(),
                site(),
                reach(),
                (),
                (),
                (),
                (),
                WIDEST,
                forward,
                dtype,
            );
            all.push(Specimen::multiplying(label("forward"), kernel));
            let settings = || target.settings(backward.units() as u32);
            let (device, compiler) = target.properties();
            let kernel = MatrixQueries::new(
                settings(),
                device,
                compiler,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                given(),
                buffer(),
                site(),
                site(),
                site(),
                site(),
                site(),
                reach(),
                (),
                (),
                (),
                (),
                WIDEST,
                backward,
                dtype,
            );
            all.push(Specimen::multiplying(label("queries"), kernel));
            let (device, compiler) = target.properties();
            let kernel = MatrixKeys::new(
                settings(),
                device,
                compiler,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                given(),
                buffer(),
                site(),
                site(),
                site(),
                site(),
                site(),
                site(),
                reach(),
                (),
                (),
                (),
                (),
                WIDEST,
                backward,
                dtype,
            );
            all.push(Specimen::multiplying(label("keys"), kernel));
        }
    }
    all
}
