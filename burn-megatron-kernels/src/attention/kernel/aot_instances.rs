//! AOT instances with the sizes of a large model.

use cubecl::prelude::{ComptimeOptionCompilationArg, LaunchArg, TensorCompilationArg};

use super::backward::{attention_delta, attention_keys, attention_queries, attention_sink};
use super::forward::attention_forward;
use super::plan::typical;
use super::tile::{DeviceMaskRangeCompilationArg, DeviceStridesCompilationArg};
use crate::cube::instance::{AotInstance, AotTarget, buffer, tensor, types};

pub(super) fn device_strides() -> DeviceStridesCompilationArg {
    DeviceStridesCompilationArg {
        offset: (),
        batch: (),
        row: (),
        head: (),
    }
}

pub(super) fn mask_range() -> DeviceMaskRangeCompilationArg {
    DeviceMaskRangeCompilationArg {
        shift: (),
        before: (),
        after: (),
        columns: (),
        rows: (),
    }
}

/// An optional tensor that is there.
pub(super) fn present<T: LaunchArg<CompilationArg = TensorCompilationArg>>()
-> ComptimeOptionCompilationArg<T> {
    ComptimeOptionCompilationArg::Some(tensor())
}

/// Every kernel in every type for heads of width 64, 96 and 128.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    const UNITS: u32 = 256;
    let (device, compiler) = target.properties();
    let sink = attention_sink::AttentionSink::new(
        target.settings(UNITS),
        device,
        compiler,
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        (),
        (),
        (),
        UNITS,
        true,
    );
    let mut all = vec![AotInstance::other("attention/sink/f32".into(), sink)];
    for (name, dtype, _) in types() {
        for width in [64, 96, 128] {
            let vector = 4;
            let [forward, backward] = typical(width, vector);
            let label = |kernel: &str| format!("attention/{kernel}/{name}/{width}");
            let (device, compiler) = target.properties();
            let settings = target.settings(forward.units() as u32);
            let kernel = attention_forward::AttentionForward::new(
                settings,
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
                vector,
                forward,
                dtype,
            );
            all.push(AotInstance::other(label("forward"), kernel));
            let (device, compiler) = target.properties();
            let kernel = attention_delta::AttentionDelta::new(
                target.settings(UNITS),
                device,
                compiler,
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                vector,
                width / vector,
                UNITS,
                dtype,
            );
            all.push(AotInstance::other(label("delta"), kernel));
            let settings = || target.settings(backward.units() as u32);
            let (device, compiler) = target.properties();
            let kernel = attention_queries::AttentionQueries::new(
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
                vector,
                backward,
                dtype,
            );
            all.push(AotInstance::other(label("queries"), kernel));
            let (device, compiler) = target.properties();
            let kernel = attention_keys::AttentionKeys::new(
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
                vector,
                backward,
                dtype,
            );
            all.push(AotInstance::other(label("keys"), kernel));
        }
    }
    all.extend(super::matrix::aot_instances(target));
    all
}
