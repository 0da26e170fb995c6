//! Support for `kernels.epilogue_fusion = "measured"`: rank 0 times the MLPs of the model with and without GELU in the
//! epilogue, and decides for all ranks.

use std::collections::BTreeMap;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{Communicator, ParallelContext, broadcast_bytes};
use burn_megatron::kernel_selection::{EpilogueFusion, EpilogueShape};
use burn_megatron::kernels::Function;
use burn_megatron::kernels::activation::{Activation, ActivationFunction};
use burn_megatron::kernels::device_memory::return_freed_memory;
use burn_megatron::kernels::gemm::gelu::{check_gelu_epilogues, gelu_gradient, linear_gelu};
use burn_megatron::kernels::gemm::linear;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::estimate;
use crate::numbers::count;
use crate::parallel_plan::ParallelPlan;
use crate::recipe::Recipe;
use crate::timing::{TimingConfig, Work, median, time_interleaved};

/// The warm-up compiles the kernels and raises the clocks of the GPU.
const TIMING: TimingConfig = TimingConfig {
    samples: 9,
    warm_up: Duration::from_millis(200),
};

/// Implementation of GELU that rank 0 has selected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpilogueDecision {
    pub fuse: bool,
    /// The line of the header, with the times or the reason.
    pub line: String,
}

/// Makes all ranks use the implementation of GELU that is faster on rank 0. Returns `None` if the recipe does not
/// request a measurement. Collective: call on all ranks, before the model is built.
///
/// # Errors
/// Returns an error on every rank if the device of rank 0 fails during the measurement.
pub fn share(
    recipe: &Recipe,
    plan: &ParallelPlan,
    device: &Device,
    world: &dyn Communicator,
) -> Result<Option<EpilogueDecision>, Error> {
    if recipe.kernels.epilogue_fusion != EpilogueFusion::Measured {
        return Ok(None);
    }
    let dtype = recipe.data_parallel.precision.of(DType::F32);
    let measure = || {
        let check =
            |mlp: &EpilogueShape| check_gelu_epilogues(device, dtype, [mlp.hidden, mlp.width]);
        let rows = rows(recipe);
        decide(mlps(recipe, plan, device), check, |mlp| {
            time(&mlp, rows, dtype, device)
        })
    };
    share_by(world, measure).map(Some)
}

fn share_by(
    world: &dyn Communicator,
    measure: impl FnOnce() -> Result<EpilogueDecision, Error>,
) -> Result<EpilogueDecision, Error> {
    let own = match world.rank() {
        0 => serde_json::to_vec(&measure().map_err(|error| error.to_string()))?,
        _ => vec![],
    };
    let shared = broadcast_bytes(world, &own, 0)?;
    let decision: Result<EpilogueDecision, String> = serde_json::from_slice(&shared)?;
    decision.map_err(|reason| {
        format!("kernels.epilogue_fusion = \"measured\": {reason}; use true or false").into()
    })
}

/// Chooses epilogues if the MLPs support them and they are faster. `time` returns the seconds with and without
/// epilogues.
fn decide(
    mlps: Result<Vec<EpilogueShape>, Error>,
    check: impl Fn(&EpilogueShape) -> Result<(), String>,
    mut time: impl FnMut(EpilogueShape) -> Result<[f64; 2], Error>,
) -> Result<EpilogueDecision, Error> {
    let checked = mlps.map_err(|error| error.to_string()).and_then(|mlps| {
        mlps.iter().try_for_each(check)?;
        match mlps.len() {
            0 => Err("the model has no MLP".into()),
            _ => Ok(mlps),
        }
    });
    let mlps = match checked {
        Ok(mlps) => mlps,
        Err(reason) => {
            return Ok(EpilogueDecision {
                fuse: false,
                line: format!("off: {}", without_advice(&reason)),
            });
        }
    };
    let layers = mlps.len();
    let mut numbers = BTreeMap::<_, usize>::new();
    for mlp in mlps {
        *numbers.entry(mlp).or_default() += 1;
    }
    let mut sums = [0.0; 2];
    for (mlp, number) in numbers {
        let times = time(mlp)?;
        for (sum, time) in sums.iter_mut().zip(times) {
            *sum += number as f64 * time;
        }
    }
    let [with, without] = sums;
    let fuse = with < without;
    Ok(EpilogueDecision {
        fuse,
        line: format!(
            "{}: {:.3} ms with, {:.3} ms without, of GELU and its matrix products in {} per micro-batch",
            if fuse { "on" } else { "off" },
            1e3 * with,
            1e3 * without,
            count(layers, "layer"),
        ),
    })
}

/// Removes the advice to remove the setting from an error. The advice does not apply to `"measured"`.
fn without_advice(reason: &str) -> &str {
    let advice = ["; or remove epilogue_fusion", "; remove epilogue_fusion"];
    let cut = advice.iter().find_map(|end| reason.strip_suffix(end));
    cut.unwrap_or(reason)
}

/// Returns the number of rows of the products: the tokens of a micro-batch on a context rank.
fn rows(recipe: &Recipe) -> usize {
    let tokens = recipe.train.micro_batch_size * recipe.sequence_length();
    tokens / recipe.parallel.context
}

/// Returns the MLPs of one rank of each pipeline stage, as built with epilogues.
fn mlps(
    recipe: &Recipe,
    plan: &ParallelPlan,
    device: &Device,
) -> Result<Vec<EpilogueShape>, Error> {
    let mut recipe = recipe.clone();
    recipe.kernels.epilogue_fusion = EpilogueFusion::On;
    let mut mlps = vec![];
    for pipeline in 0..recipe.parallel.pipeline {
        let rank = estimate::first_of(&plan.mesh, pipeline);
        let groups = ParallelContext::offline(plan.mesh.clone(), rank)?;
        let builder = estimate::builder(&recipe, &groups, device)?;
        let builder = builder.with_recompute(&recipe.memory.recompute())?;
        let length = recipe.sequence_length();
        let outline = recipe.model.outline(builder, &recipe.sharing(), length)?;
        mlps.extend_from_slice(outline.kernels.epilogue_shapes());
    }
    Ok(mlps)
}

/// Times an MLP with and without epilogues. Returns the median seconds of both forms.
fn time(
    mlp: &EpilogueShape,
    rows: usize,
    dtype: DType,
    device: &Device,
) -> Result<[f64; 2], Error> {
    let [with, without] = forms(mlp, rows, (device, dtype));
    let times = time_interleaved(device, TIMING, &[&with, &without])?;
    drop((with, without));
    return_freed_memory(device);
    Ok([median(&times[0]), median(&times[1])])
}

/// Returns the first product of an MLP with GELU and the gradient of its output, with and without epilogues.
fn forms(mlp: &EpilogueShape, rows: usize, on: (&Device, DType)) -> [Work<'static>; 2] {
    let EpilogueShape {
        hidden,
        width,
        bias,
    } = *mlp;
    let filled = |sizes: [usize; 2]| Tensor::<2>::full(sizes, 0.5, on);
    let (x, gradient) = (filled([rows, hidden]), filled([rows, hidden]));
    let (up, down) = (filled([hidden, width]), filled([width, hidden]));
    let bias = bias.then(|| filled([1, width]).reshape([width]));
    let operands = (x, gradient, up, down, bias);
    let of_epilogues = operands.clone();
    let with = move || {
        let (x, gradient, up, down, bias) = of_epilogues.clone();
        Box::new(move || {
            let has_bias = bias.is_some();
            let input = linear_gelu(x, up, bias).input;
            drop(gelu_gradient(gradient, down, input, has_bias));
        }) as Box<dyn FnOnce() + Send>
    };
    let without = move || {
        let (x, gradient, up, down, bias) = operands.clone();
        Box::new(move || {
            let needed = vec![true; 1 + usize::from(bias.is_some())];
            let gelu =
                ActivationFunction::new(Activation::GeluTanh, bias.is_some().then_some(None));
            let input = linear(x, up, None).into_dispatch();
            let bias = bias.map(Tensor::into_dispatch);
            let (_, saved) = gelu.forward([Some(input), bias].into_iter().flatten().collect());
            let product = linear(gradient, down.transpose(), None).into_dispatch();
            drop(gelu.backward(saved, product, &needed));
        }) as Box<dyn FnOnce() + Send>
    };
    [Box::new(with), Box::new(without)]
}

#[cfg(test)]
#[path = "epilogues_tests.rs"]
mod tests;
