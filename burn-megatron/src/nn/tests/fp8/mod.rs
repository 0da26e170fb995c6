//! Tests FP8 layers against explicit formulas.

mod activated;
mod experts;
mod formulas;
mod linear;
mod ranks;
mod records;
mod settings;
mod steps;
mod transcription;
mod weights;

use burn::module::Param;
use burn::tensor::{DType, Tensor};

use super::{autodiff, leaf, part, values, wave};
use crate::comm::ParallelContext;
use crate::nn::fp8::*;
use crate::nn::*;

/// Returns every recipe, in both formats and with settings that affect the result.
fn recipes() -> Vec<(Fp8Recipe, Fp8Format)> {
    let delayed = DelayedScaling {
        history: 3,
        ..DelayedScaling::default()
    };
    let current = CurrentScaling {
        power_of_two: true,
        ..CurrentScaling::default()
    };
    let exact = BlockScaling {
        power_of_two: false,
    };
    let recipes = [
        Fp8Recipe::Delayed(delayed),
        Fp8Recipe::Current(CurrentScaling::default()),
        Fp8Recipe::Current(current),
        Fp8Recipe::Blockwise(BlockScaling::default()),
        Fp8Recipe::Blockwise(exact),
        Fp8Recipe::MxFp8,
    ];
    let both = |recipe| [(recipe, Fp8Format::Hybrid), (recipe, Fp8Format::E4m3)];
    recipes.into_iter().flat_map(both).collect()
}

fn config((recipe, format): (Fp8Recipe, Fp8Format)) -> Fp8Config {
    Fp8Config {
        recipe: Some(recipe),
        format,
        ..Fp8Config::default()
    }
}

/// Returns f32 values of many magnitudes. Some exceed the range of a scale, and some are rounded to zero.
fn spread<const D: usize>(shape: [usize; D], phase: f64) -> Tensor<D> {
    let size = wave(shape, 7.0 + phase).mul_scalar(6.0).exp();
    (wave(shape, phase) * size).cast(DType::F32)
}

/// Returns integers whose sums of products are exact in f32. The largest magnitude is 7, so all scales are powers of
/// two and no code is rounded.
fn integers<const D: usize>(shape: [usize; D], phase: f64) -> Tensor<D> {
    let one = wave(shape, phase).mul_scalar(5.4).round().clamp(-7.0, 7.0);
    one.cast(DType::F32)
}

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().convert::<f32>().try_into_vec().unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn builder(groups: &ParallelContext, fp8: &Fp8Config) -> ModelBuilder {
    ModelBuilder::with(groups, &autodiff(), 7, DType::F32)
        .with_fp8(fp8)
        .unwrap()
}

/// Returns the state of a layer with these scales and an empty history.
fn state(scales: [f32; 3], history: usize) -> Fp8LayerState {
    let [input, weight, gradient] = scales.map(|scale| ScaleState {
        scale: scale.to_bits(),
        history: vec![0; history],
    });
    Fp8LayerState {
        input,
        weight,
        gradient,
    }
}

/// Creates a parameter with these values.
fn parameter<const D: usize>(value: Tensor<D>) -> Param<Tensor<D>> {
    Param::from_tensor(leaf(value))
}

/// Returns the gradients for the output gradient `dy`.
fn backward(y: Tensor<3>, dy: Tensor<3>) -> burn::tensor::Gradients {
    (y * Tensor::from_inner(dy)).sum().backward()
}
