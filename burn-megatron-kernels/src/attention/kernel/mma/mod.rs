//! Attention by `mma.sync` in the shape of FlashAttention-2 (Dao, 2023): 16 by 8 by 16 products with
//! sums in f32, tiles copied by `cp.async` while the ones before are worked on, scores and weights
//! in registers.
//!
//! The kernels are those of the parent module with other tiles. The backward has one kernel over
//! blocks of keys and one over blocks of queries, so that every sum has one order. Delta and the
//! gradient of the sink are computed by the kernels of the parent module.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

mod aot_instances;
mod forward;
mod keys;
mod plan;
mod queries;
mod tile;
mod visible;

pub(super) use aot_instances::aot_instances;
pub(in crate::attention) use plan::{MAX_WIDTH, STEP, shared_memory};

use forward::mma_forward;
use keys::mma_keys;
use plan::{MmaShape, plan};
use queries::mma_queries;

use super::super::problem::AttentionProblem;
use super::AttentionCall;
use super::launch::{KeyTarget, LaunchArgs, Tiles, tiles};
use super::tile::DeviceStridesLaunch;
use crate::cube::mma;
use crate::gradient::Place;

/// Outputs as [`AttentionForwardOp`](super::super::ops::AttentionForwardOp) has them.
pub(in crate::attention) fn forward(
    problem: &AttentionProblem,
    inputs: Vec<CubeTensor>,
    with_max: bool,
) -> Vec<CubeTensor> {
    AttentionCall::new(problem, aligned(problem, inputs), None, plan).forward(with_max)
}

/// Outputs as [`AttentionBackwardOp`](super::super::ops::AttentionBackwardOp) has them.
pub(in crate::attention) fn backward(
    problem: &AttentionProblem,
    inputs: Vec<CubeTensor>,
    places: Option<[Place; 2]>,
) -> Vec<CubeTensor> {
    AttentionCall::new(problem, aligned(problem, inputs), places, plan).backward()
}

/// The inputs with [aligned](mma::aligned) projections.
fn aligned(problem: &AttentionProblem, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let rest = inputs.split_off(if problem.packed { 1 } else { 3 });
    inputs.into_iter().map(mma::aligned).chain(rest).collect()
}

tiles!(
    MmaShape,
    |tiles: &Self| [tiles.rows(), tiles.units()],
    mma_forward,
    mma_queries,
    mma_keys,
    [vector, is_flat]
);
