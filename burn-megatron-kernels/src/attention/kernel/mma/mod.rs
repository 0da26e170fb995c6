//! Attention with `mma.sync`, following FlashAttention-2 (Dao, 2023). Matrix multiplications use tiles of 16 by 8 by 16
//! with sums in f32. `cp.async` copies the next tiles while the current tiles are processed. Scores and weights stay in
//! registers.
//!
//! The kernels correspond to the kernels of the parent module, with different tiles. The backward pass has one kernel
//! over blocks of keys and one kernel over blocks of queries, so that every sum has a fixed order. The kernels of the
//! parent module compute delta and the gradient of the sink.

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
use plan::MmaShape;
pub(super) use plan::plan;
use queries::mma_queries;

use super::super::problem::AttentionProblem;
use super::launch::{KeyTarget, LaunchArgs, Tiles, tiles};
use super::tile::DeviceStridesLaunch;
use crate::cube::{launch, mma};

/// Returns the inputs with [aligned](mma::aligned) projections.
pub(super) fn aligned(problem: &AttentionProblem, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let rest = inputs.split_off(problem.projections());
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
