//! Compares training steps of small models on a device with the same steps on the CPU.

use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{Precision, format_bytes};
use burn_megatron::device::{DeviceKind, is_unchecked};
use burn_megatron::nn::fp8::Fp8Recipe;
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError};

use super::outcome::Findings;
use crate::error::Error;
use crate::estimate;
use crate::family::Model;
use crate::recipe::Recipe;
use crate::timed_steps::{self, NamedModel, RandomTokens, set_steps};
use crate::timing::median;
use crate::verify::models::VerifyModel;

const STEPS: usize = 5;

/// The names of the FP8 recipes.
const EIGHT_BITS: [&str; 4] = ["delayed", "current", "blockwise", "mxfp8"];

/// Returns the bound of the difference between the losses, relative to the loss on the CPU.
fn bound(precision: Precision) -> f64 {
    match precision {
        Precision::Bf16 | Precision::F16 => 1e-2,
        Precision::F32 | Precision::F64 => 1e-4,
    }
}

/// Checks training steps of a Llama and of a model with experts.
pub fn steps(device: &Device) -> Result<Findings, Error> {
    let mut found = Findings::default();
    // The host reads the number of rows of each expert from the device. Wrong results could have any size.
    let models: &[_] = match is_unchecked() {
        true => &[VerifyModel::Llama],
        false => &[VerifyModel::Llama, VerifyModel::Mixtral],
    };
    for model in models {
        for precision in [Precision::F32, Precision::Bf16] {
            let recipe = small(*model, precision);
            let name = format!("{} in {precision}", model.name());
            compare(&name, &recipe, device, &mut found)?;
        }
    }
    Ok(found)
}

/// Checks training steps of a Llama with each FP8 recipe.
pub fn eight_bits(device: &Device) -> Result<Findings, Error> {
    let mut found = Findings::default();
    found.note("engine", burn_megatron::kernels::fp8::engine_of_fp8(device));
    for name in EIGHT_BITS {
        let mut recipe = small(VerifyModel::Llama, Precision::Bf16);
        recipe.fp8.recipe = Some(name.parse::<Fp8Recipe>()?);
        compare(name, &recipe, device, &mut found)?;
    }
    Ok(found)
}

/// Measures the memory and the speed of GPT-2 with 124M parameters on a CUDA device. Other devices run a tiny model.
pub fn memory(device: &Device, kind: DeviceKind) -> Result<Findings, Error> {
    let (model, precision) = match kind {
        DeviceKind::Cuda => (NamedModel::Small, Precision::Bf16),
        DeviceKind::Cpu | DeviceKind::Wgpu => (NamedModel::Tiny, Precision::F32),
    };
    let mut recipe = Recipe {
        model: Model::of_hf(model.family(), model.config()),
        ..Recipe::default()
    };
    recipe.data_parallel.precision = precision;
    set_steps(&mut recipe, [4, 4], 10);
    let timed = timed_steps::run(&recipe, device, 5)?;
    let mut found = Findings::default();
    let tokens = (4 * recipe.model.context()) as f64 / median(&timed.seconds);
    found.note(
        model.name(),
        format!("{tokens:.0} tokens/s in {precision}, 4 sequences per step"),
    );
    found.note("kernels", timed.kernels);
    if let Some(bytes) = timed.peak_bytes {
        found.note("memory of the pools", format_bytes(bytes));
    }
    if let Some(bytes) = timed.driver_bytes {
        found.note("memory in use by the driver", format_bytes(bytes));
    }
    Ok(found)
}

fn small(model: VerifyModel, precision: Precision) -> Recipe {
    let mut config = model.config();
    // Dropout would hide small differences.
    (config.dropout, config.attention_dropout) = (0.0, 0.0);
    let mut recipe = Recipe {
        model: Model::of(model.name(), config),
        ..Recipe::default()
    };
    recipe.data_parallel.precision = precision;
    recipe.train.learning_rate = 1e-3;
    set_steps(&mut recipe, [4, 4], STEPS);
    recipe
}

/// Adds the largest difference between the losses of all steps.
fn compare(
    name: &str,
    recipe: &Recipe,
    device: &Device,
    found: &mut Findings,
) -> Result<(), Error> {
    if !device.supports_dtype(recipe.data_parallel.precision.of(burn::tensor::DType::F32)) {
        return Ok(());
    }
    let expected = losses(recipe, &Device::flex())?;
    let computed = losses(recipe, device)?;
    let differences = computed.iter().zip(&expected);
    let differences = differences.map(|(computed, expected)| (computed / expected - 1.0).abs());
    // A NaN counts as the largest difference.
    let largest = differences.fold(0.0, |most: f64, x| if x <= most { most } else { x });
    let name = format!("{name}: losses of {STEPS} steps");
    found.difference(name, largest, bound(recipe.data_parallel.precision));
    Ok(())
}

fn losses(recipe: &Recipe, device: &Device) -> Result<Vec<f64>, Error> {
    let builder = estimate::builder(recipe, &ParallelContext::single(), device)?;
    let config = recipe.train_config();
    let mut trainer = recipe.model.trainer(builder, &config)?;
    let data = RandomTokens {
        vocabulary: recipe.model.vocabulary(),
        length: recipe.model.context(),
        seed: 1,
    };
    let mut losses = Losses(vec![]);
    trainer.fit(&data, &mut losses)?;
    Ok(losses.0)
}

/// Collects the loss of each step.
struct Losses(Vec<f64>);

impl Observer for Losses {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.0.push(metrics.loss);
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}
