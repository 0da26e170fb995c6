//! AOT instances with the sizes of a large model.

use cubecl::ir::{ElemType, FloatKind};

use super::super::aot_instances::{device_strides, mask_range, present};
use super::MAX_VECTOR;
use super::forward::matrix_forward::MatrixForward;
use super::keys::matrix_keys::MatrixKeys;
use super::plan::{TileMultiplier, blocks};
use super::queries::matrix_queries::MatrixQueries;
use crate::cube::instance::{AotInstance, AotTarget, buffer};

/// Every kernel in both types for heads of width 64, 96 and 128.
pub(in crate::attention::kernel) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = Vec::new();
    for (name, kind) in [("f16", FloatKind::F16), ("bf16", FloatKind::BF16)] {
        for width in [64, 96, 128] {
            let dtype = ElemType::Float(kind);
            let label = |kernel: &str| format!("attention/matrix-{kernel}/{name}/{width}");
            let memory = target.device.hardware.max_shared_memory_size;
            let [forward, backward] =
                blocks(width, MAX_VECTOR, memory, TileMultiplier::MatrixUnits);
            let (device, compiler) = target.properties();
            let kernel = MatrixForward::new(
                target.settings(forward.units() as u32),
                device,
                compiler,
                buffer(),
                buffer(),
                buffer(),
                present(),
                present(),
                buffer(),
                buffer(),
                device_strides(),
                device_strides(),
                device_strides(),
                device_strides(),
                mask_range(),
                (),
                (),
                (),
                (),
                MAX_VECTOR,
                forward,
                dtype,
            );
            all.push(AotInstance::multiplying(label("forward"), kernel));
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
                present(),
                buffer(),
                device_strides(),
                device_strides(),
                device_strides(),
                device_strides(),
                device_strides(),
                mask_range(),
                (),
                (),
                (),
                (),
                MAX_VECTOR,
                backward,
                dtype,
            );
            all.push(AotInstance::multiplying(label("queries"), kernel));
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
                present(),
                buffer(),
                device_strides(),
                device_strides(),
                device_strides(),
                device_strides(),
                device_strides(),
                device_strides(),
                mask_range(),
                (),
                (),
                (),
                (),
                MAX_VECTOR,
                backward,
                dtype,
            );
            all.push(AotInstance::multiplying(label("keys"), kernel));
        }
    }
    all
}
