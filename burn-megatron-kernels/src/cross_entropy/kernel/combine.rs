//! The kernel that combines the statistics of all shards to the loss. Each unit computes one row.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::ops::{LossOp, LossWeights};
use super::super::{STATISTICS, ignored};
use super::statistics::RowStatistics;
use super::{IGNORED_TARGET, INVALID_TARGET, token_of};
use crate::cube::{empty, launch};

/// The number of units per cube.
pub(super) const UNITS: u32 = 128;

/// Computes `loss` and `lse`, `[rows]` each, from `statistics` `[parts, rows, 4]`.
#[cube(launch_unchecked)]
pub(super) fn combine_kernel<I: Int>(
    statistics: &Tensor<f32>,
    targets: &Tensor<I>,
    loss: &mut Tensor<f32>,
    lse: &mut Tensor<f32>,
    parts: u32,
    rows: u32,
    tokens: u32,
    weights: LossScales,
    #[comptime] smoothed: bool,
    #[comptime] ignore: Option<i64>,
    #[define(I)] _type: ElemType,
) {
    let row = ABSOLUTE_POS;
    if row < rows as usize {
        let step = rows as usize * STATISTICS;
        let first = row * STATISTICS;
        let mut largest = statistics[first];
        for part in 1..parts as usize {
            largest = max(largest, statistics[part * step + first]);
        }
        let mut exponentials = 0.0f32;
        let mut target = 0.0f32;
        let mut sum = 0.0f32;
        for part in 0..parts as usize {
            let at = part * step + first;
            exponentials += statistics[at + 1] * (statistics[at] - largest).exp();
            target += statistics[at + 2];
            sum += statistics[at + 3];
        }
        let own = RowStatistics {
            largest,
            exponentials,
            target,
            sum,
        };
        let token = token_of::<I>(targets[row], tokens, ignore);
        loss[row] = row_loss(&own, token, &weights, smoothed);
        lse[row] = log_sum_exp(&own);
    }
}

/// The weights of the terms of the loss as kernel arguments. See [`LossWeights`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct LossScales {
    pub keep: f32,
    pub share: f32,
    pub smoothing: f32,
    pub z: f32,
    /// NaN. It is an argument, because WGSL has no constant for it.
    pub nan: f32,
}

impl LossScales {
    pub fn launch(weights: &LossWeights) -> LossScalesLaunch {
        LossScalesLaunch::new(
            weights.keep as f32,
            weights.share as f32,
            weights.smoothing as f32,
            weights.z as f32,
            f32::NAN,
        )
    }
}

#[cube]
pub(super) fn log_sum_exp(row: &RowStatistics) -> f32 {
    row.largest + row.exponentials.ln()
}

/// Returns the loss of a row.
#[cube]
pub(super) fn row_loss(
    row: &RowStatistics,
    token: u32,
    weights: &LossScales,
    #[comptime] smoothed: bool,
) -> f32 {
    let largest = row.largest;
    // In this order, large logits cancel before small terms are added.
    let mut value = weights.keep * (largest - row.target) + row.exponentials.ln();
    if comptime!(smoothed) {
        value += weights.smoothing * largest - weights.share * row.sum;
    }
    if weights.z != 0.0 {
        let lse = log_sum_exp(row);
        value += weights.z * lse * lse;
    }
    if token == IGNORED_TARGET {
        value = 0.0f32;
    } else if token == INVALID_TARGET {
        value = weights.nan;
    }
    value
}

/// Computes the loss and the log-sum-exp from statistics and targets.
pub(in crate::cross_entropy) fn combine(op: &LossOp, inputs: [CubeTensor; 2]) -> [CubeTensor; 2] {
    let [statistics, targets] = inputs;
    let rows = targets.meta.shape()[0];
    let outputs = [(); 2].map(|()| empty(&statistics, [rows], statistics.dtype));
    if rows == 0 {
        return outputs;
    }
    let parts = statistics.meta.shape().num_elements() / (rows * STATISTICS);
    let client = statistics.client.clone();
    let dtype = targets.dtype;
    let ignore = ignored(op.vocabulary.ignore, dtype);
    unsafe {
        launch!(
            combine_kernel,
            [client, rows.div_ceil(UNITS as usize), UNITS],
            [],
            [statistics, targets, &outputs[0], &outputs[1]],
            (parts as u32, rows as u32, op.vocabulary.tokens),
            (LossScales::launch(&op.weights), op.weights.smoothing != 0.0),
            (ignore, dtype_to_storage_type(dtype))
        );
    }
    outputs
}
