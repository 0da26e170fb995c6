//! The kernels for the weights of chosen experts, and for the gradient of the logits.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{AOT_CUBE, TokenCube, scores};
use crate::cube::instance::{AotList, instance, types};
use crate::cube::{empty, launch, matrix_sizes};
use crate::launch::exactly;
use crate::moe::router::RouterOptions;
use crate::moe::score::ScoreFunction;
use crate::moe::score::kernel::{is_softmax, least, numerator, slope};
use crate::moe::score::row::{Denominator, row_denominator};

/// The compile-time parameters of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct WeightsVariant {
    score: ScoreFunction,
    /// Whether the weights are divided by their sum.
    normalizes: bool,
    cube: TokenCube,
}

impl WeightsVariant {
    fn new(options: &RouterOptions, cube: TokenCube) -> Self {
        Self {
            score: options.score,
            normalizes: options.normalizes(),
            cube,
        }
    }
}

/// Returns whether there is an expert with this index.
#[cube]
fn is_expert(index: i32, experts: u32) -> bool {
    index >= 0i32 && index < experts as i32
}

/// Returns the divisor of a token's weights. All units of the cube must call this function.
#[cube]
fn denominator<F: Float>(
    logits: &Tensor<F>,
    indices: &Tensor<i32>,
    start: usize,
    slots: usize,
    experts: u32,
    top_k: u32,
    #[comptime] variant: WeightsVariant,
) -> Denominator {
    let score = comptime!(variant.score);
    let mut largest = 0.0f32;
    let mut total = 1.0f32;
    if comptime!(variant.score == ScoreFunction::PreSoftmax) {
        let units = comptime!(variant.cube.units);
        let planes = comptime!(variant.cube.planes);
        let of_row = row_denominator::<F>(logits, start, experts, score, units, planes);
        largest = of_row.largest;
        total = of_row.total;
    } else if comptime!(variant.normalizes) {
        if comptime!(is_softmax(score)) {
            largest = f32::min_value();
            for slot in 0..top_k {
                let index = indices[slots + slot as usize];
                if is_expert(index, experts) {
                    largest = max(largest, f32::cast_from(logits[start + index as usize]));
                }
            }
        }
        total = comptime!(least(score)).runtime();
        for slot in 0..top_k {
            let index = indices[slots + slot as usize];
            if is_expert(index, experts) {
                let z = f32::cast_from(logits[start + index as usize]);
                total += numerator(z, largest, score);
            }
        }
    }
    Denominator { largest, total }
}

#[cube(launch_unchecked)]
fn router_weights_kernel<F: Float>(
    logits: &Tensor<F>,
    indices: &Tensor<i32>,
    weights: &mut Tensor<f32>,
    tokens: u32,
    experts: u32,
    top_k: u32,
    factor: f32,
    #[comptime] variant: WeightsVariant,
    #[define(F)] _dtype: ElemType,
) {
    let token = CUBE_POS;
    if token < tokens as usize {
        let start = token * experts as usize;
        let slots = token * top_k as usize;
        let shared = denominator::<F>(logits, indices, start, slots, experts, top_k, variant);
        let mut slot = UNIT_POS;
        while slot < top_k {
            let index = indices[slots + slot as usize];
            let mut weight = 0.0f32;
            if is_expert(index, experts) {
                let z = f32::cast_from(logits[start + index as usize]);
                weight = factor * numerator(z, shared.largest, variant.score) / shared.total;
            }
            weights[slots + slot as usize] = weight;
            slot += comptime!(variant.cube.units);
        }
    }
}

#[cube(launch_unchecked)]
fn router_weights_gradient_kernel<F: Float>(
    logits: &Tensor<F>,
    indices: &Tensor<i32>,
    upstream: &Tensor<f32>,
    gradient: &mut Tensor<F>,
    tokens: u32,
    experts: u32,
    top_k: u32,
    factor: f32,
    #[comptime] variant: WeightsVariant,
    #[define(F)] _dtype: ElemType,
) {
    let token = CUBE_POS;
    if token < tokens as usize {
        let start = token * experts as usize;
        let slots = token * top_k as usize;
        let shared = denominator::<F>(logits, indices, start, slots, experts, top_k, variant);
        // The mean of the gradients. It is weighted by the router weights before they are multiplied by the scaling
        // factor.
        let mut mean = 0.0f32;
        if comptime!(variant.normalizes) {
            for slot in 0..top_k {
                let index = indices[slots + slot as usize];
                if is_expert(index, experts) {
                    let z = f32::cast_from(logits[start + index as usize]);
                    let score = numerator(z, shared.largest, variant.score) / shared.total;
                    mean += upstream[slots + slot as usize] * score;
                }
            }
        }
        let mut expert = UNIT_POS;
        while expert < experts {
            let mut own = 0.0f32;
            let mut counts =
                comptime!(u32::from(variant.score == ScoreFunction::PreSoftmax)).runtime();
            for slot in 0..top_k {
                if indices[slots + slot as usize] == expert as i32 {
                    own = upstream[slots + slot as usize];
                    counts = 1u32.runtime();
                }
            }
            let mut value = 0.0f32;
            if counts == 1u32 {
                let z = f32::cast_from(logits[start + expert as usize]);
                let slope = slope(z, shared.largest, variant.score) / shared.total;
                value = factor * slope * (own - mean);
            }
            gradient[start + expert as usize] = F::cast_from(value);
            expert += comptime!(variant.cube.units);
        }
    }
}

/// Computes the weights. See [`RouterOp`](super::super::backward::RouterOp).
pub(in crate::moe::router) fn weights(
    options: &RouterOptions,
    inputs: Vec<CubeTensor>,
) -> CubeTensor {
    let [logits, indices] = exactly(inputs);
    let client = logits.client.clone();
    let [tokens, experts] = matrix_sizes(&logits);
    let weights = empty(&logits, [tokens, options.top_k], DType::F32);
    if tokens == 0 {
        return weights;
    }
    let variant = WeightsVariant::new(options, TokenCube::new(&client, &logits));
    let dtype = dtype_to_storage_type(logits.dtype);
    // SAFETY: slots past the last one, and indices without an expert, access no memory.
    unsafe {
        launch!(
            router_weights_kernel,
            [client, tokens, variant.cube.units],
            [],
            [logits, indices, &weights],
            (tokens as u32, experts as u32, options.top_k as u32),
            (options.scaling_factor as f32),
            (variant, dtype)
        );
    }
    weights
}

/// Computes the gradient. See [`RouterOp`](super::super::backward::RouterOp).
pub(in crate::moe::router) fn gradient(
    options: &RouterOptions,
    inputs: Vec<CubeTensor>,
) -> CubeTensor {
    let [logits, indices, upstream] = exactly(inputs);
    let client = logits.client.clone();
    let [tokens, experts] = matrix_sizes(&logits);
    let gradient = empty(&logits, [tokens, experts], logits.dtype);
    if tokens == 0 {
        return gradient;
    }
    let variant = WeightsVariant::new(options, TokenCube::new(&client, &logits));
    let dtype = dtype_to_storage_type(logits.dtype);
    // SAFETY: as above.
    unsafe {
        launch!(
            router_weights_gradient_kernel,
            [client, tokens, variant.cube.units],
            [],
            [logits, indices, upstream, &gradient],
            (tokens as u32, experts as u32, options.top_k as u32),
            (options.scaling_factor as f32),
            (variant, dtype)
        );
    }
    gradient
}

/// Adds an AOT instance for each score function.
pub(super) fn aot_instances(list: &mut AotList) {
    for (name, dtype, _) in types() {
        for (of, score) in scores() {
            let variant = WeightsVariant {
                score,
                normalizes: true,
                cube: AOT_CUBE,
            };
            instance!(
                list.other("moe/weights/{name}/{of}"), AOT_CUBE.units,
                router_weights_kernel::RouterWeightsKernel [_ _ _ _ _ _ _] (variant, dtype)
            );
            instance!(
                list.other("moe/router-gradient/{name}/{of}"), AOT_CUBE.units,
                router_weights_gradient_kernel::RouterWeightsGradientKernel
                [_ _ _ _ _ _ _ _] (variant, dtype)
            );
        }
    }
}
