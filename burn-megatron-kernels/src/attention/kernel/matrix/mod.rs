//! Attention by matrix units: cooperative products of 16 by 16 by 16 with sums in f32.
//!
//! The kernels are those of the parent module with other tiles: tiles keep the type of the inputs,
//! a plane owns a warp tile of 16 rows, and weights are rounded to that type before they are
//! multiplied by the values, as in FlashAttention-2. Delta and the gradient of the sink are
//! computed by the kernels of the parent module.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

mod aot_instances;
mod forward;
mod keys;
mod plan;
mod queries;
mod tile;
mod warp_tile;

pub(super) use aot_instances::aot_instances;
pub(in crate::attention) use plan::{MAX_WIDTH, TILE, TileMultiplier, missing_support};

use forward::matrix_forward;
use keys::matrix_keys;
use plan::{MatrixTiles, plan};
use queries::matrix_queries;

use super::super::problem::AttentionProblem;
use super::AttentionCall;
use super::launch::{LaunchArgs, Tiles, launch};
use super::tile::DeviceStridesLaunch;

/// Outputs as [`AttentionForwardOp`](super::super::ops::AttentionForwardOp) has them.
pub(in crate::attention) fn forward(
    problem: &AttentionProblem,
    products: TileMultiplier,
    inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    AttentionCall::new(problem, inputs, plan(products)).forward()
}

/// Outputs as [`AttentionBackwardOp`](super::super::ops::AttentionBackwardOp) has them.
pub(in crate::attention) fn backward(
    problem: &AttentionProblem,
    products: TileMultiplier,
    inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    AttentionCall::new(problem, inputs, plan(products)).backward()
}

impl Tiles for MatrixTiles {
    fn rows(&self) -> usize {
        self.rows()
    }

    fn forward(
        args: LaunchArgs<Self>,
        sink: ComptimeOptionArgs<OwnedTensor<f32>>,
        [out, lse]: [BufferArg; 2],
    ) {
        launch!(matrix_forward, args, [sink], [out, lse], [])
    }

    fn queries(
        args: LaunchArgs<Self>,
        [dout, lse, delta]: [BufferArg; 3],
        dq: BufferArg,
        strides: DeviceStridesLaunch,
    ) {
        launch!(matrix_queries, args, [dout, lse, delta], [dq], [strides])
    }

    fn keys(
        args: LaunchArgs<Self>,
        [dout, lse, delta]: [BufferArg; 3],
        gradients: BufferArg,
        [dk, dv]: [DeviceStridesLaunch; 2],
    ) {
        launch!(matrix_keys, args, [dout, lse, delta], [gradients], [dk, dv])
    }
}
