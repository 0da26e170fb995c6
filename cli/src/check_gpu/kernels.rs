//! Compares the results of kernels and matrix multiplications on a device with the CPU, on equal inputs.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_megatron::device::DeviceKind;
use burn_megatron::kernels::attention::{
    AttentionEngine, EngineKind, Heads, Portable, Window, select_engine,
};
use burn_megatron::kernels::gemm::{engine_of, slow_reason};
use burn_megatron_verify::devices::relative_difference;

use super::outcome::Findings;
use crate::error::Error;
use crate::kernel_cases::{Direction, Inputs, KernelBenchmark, Shape, subjects};

/// Rows and features. Neither is a multiple of the number that a thread block processes.
const SHAPE: Shape = Shape {
    rows: 96,
    width: 192,
};

/// The compute types of models.
const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Returns the bound of a difference relative to the largest value: several rounding errors of the type.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 3e-2,
        DType::F16 => 4e-3,
        _ => 1e-4,
    }
}

/// Checks matrix multiplications, and reports the engine that computes them.
pub fn products(device: &Device, kind: DeviceKind) -> Result<Findings, Error> {
    let mut found = Findings::default();
    let problem = slow_reason(device).map(|reason| format!(
            "this engine is slow: {reason}. Install cuBLASLt (pip install nvidia-cublas-cu12, or nvidia-cublas for CUDA 13) and \
             add the folder of its library to LD_LIBRARY_PATH"
        ));
    let problem = problem.filter(|_| kind == DeviceKind::Cuda);
    found.push("engine", engine_of(device), problem);
    compare(device, &mut found, |subject| is_product(subject.name))?;
    Ok(found)
}

/// Checks every fused kernel.
pub fn kernels(device: &Device) -> Result<Findings, Error> {
    let mut found = Findings::default();
    compare(device, &mut found, |subject| !is_product(subject.name))?;
    Ok(found)
}

fn is_product(name: &str) -> bool {
    ["linear", "weight-gradient"].contains(&name)
}

fn compare(
    device: &Device,
    found: &mut Findings,
    wanted: impl Fn(&KernelBenchmark) -> bool,
) -> Result<(), Error> {
    for subject in subjects().iter().filter(|subject| wanted(subject)) {
        for dtype in TYPES {
            // An optimizer step is always computed in f32.
            let is_left_out = subject.f32_from == 0 && dtype != DType::F32;
            if is_left_out || !device.supports_dtype(dtype) {
                continue;
            }
            let portable: Arc<dyn AttentionEngine> = Arc::new(Portable);
            let host = (&Device::flex(), dtype);
            let host = Inputs::draw(subject, &SHAPE, host, Arc::clone(&portable))?;
            let names = ["forward".to_string()].into_iter();
            let names = names.chain((0..).map(|leaf| format!("gradient {leaf}")));
            let expected = results(subject, &host)?;
            let computed = results(subject, &host.on((device, dtype), portable)?)?;
            for ((name, expected), computed) in names.zip(&expected).zip(&computed) {
                let difference = relative_difference(computed, expected, f64::MIN_POSITIVE);
                let name = format!("{} {name} in {dtype:?}", subject.name);
                found.difference(name, difference, bound(dtype));
            }
        }
    }
    Ok(())
}

/// Returns the output of an operation, and the gradient of each leaf if the operation has a backward.
fn results(subject: &KernelBenchmark, inputs: &Inputs) -> Result<Vec<Vec<f64>>, Error> {
    let output = (subject.fused)(&mut inputs.owning(subject.written));
    let mut results = vec![values(output.clone())?];
    if subject.bytes(Direction::Backward, &inputs.shape, DType::F32) == 0 {
        return Ok(results);
    }
    let track = |leaf: &Tensor<1>| Tensor::from_inner(leaf.clone()).require_grad();
    let leaves: Vec<Tensor<1>> = inputs.leaves.iter().map(track).collect();
    let output = (subject.fused)(&mut inputs.with_leaves(leaves.clone()));
    // The weights are equal on all devices and have both signs.
    let count = output.shape().num_elements();
    let weights = (0..count).map(|i| (i % 7) as f32 - 3.0).collect();
    let weights = Tensor::<1>::from_data(TensorData::new(weights, [count]), &output.device());
    let gradients = (output.clone() * weights.cast(output.dtype()))
        .sum()
        .backward();
    for leaf in &leaves {
        if let Some(gradient) = leaf.grad(&gradients) {
            results.push(values(gradient)?);
        }
    }
    Ok(results)
}

fn values(x: Tensor<1>) -> Result<Vec<f64>, Error> {
    Ok(x.try_into_data()?.iter().collect())
}

/// Checks each attention engine in each type, for heads of several widths.
pub fn attention(device: &Device, kind: DeviceKind) -> Result<Findings, Error> {
    let mut found = Findings::default();
    let heads = |heads, groups, width| Heads {
        heads,
        groups,
        width,
    };
    let problems = [
        (heads(12, 12, 64), None),
        (heads(8, 2, 128), None),
        (heads(4, 4, 64), Some(Window { left: 40, right: 0 })),
    ];
    for engine in EngineKind::ALL {
        for dtype in TYPES
            .into_iter()
            .filter(|dtype| device.supports_dtype(*dtype))
        {
            let select = |(heads, window): &(Heads, Option<Window>)| {
                let sizes = (*heads, heads.width);
                let selected = select_engine(&[engine], device, dtype, sizes, *window);
                selected.map_err(|reason| format!("cannot be used for {heads:?}: {reason}"))
            };
            let (value, problem) = match problems.iter().try_for_each(|of| select(of).map(drop)) {
                Ok(()) => ("agrees with the portable engine".into(), None),
                // Only NVIDIA GPUs have these matrix units, and only for 16-bit types.
                Err(reason) if kind == DeviceKind::Cuda && dtype.size() == 2 => {
                    (reason, Some("attention is slow without this engine".into()))
                }
                Err(_) => ("not for this device and type".into(), None),
            };
            found.push(format!("{engine} in {dtype:?}"), value, problem);
        }
    }
    Ok(found)
}
