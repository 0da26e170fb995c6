//! Attention by `mma.sync` in the shape of FlashAttention-2 (Dao, 2023): 16 by 8 by 16 products with
//! sums in f32, tiles copied by `cp.async` while the ones before are worked on, scores and weights
//! in registers.
//!
//! The kernels are those of the parent module with other tiles. The backward has one kernel over
//! blocks of keys and one over blocks of queries, so that every sum has one order. Delta and the
//! gradient of the sink are computed by the kernels of the parent module.

use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

mod aot_instances;
mod forward;
mod keys;
mod plan;
mod ptx;
mod queries;
mod tile;
mod visible;

pub(super) use aot_instances::aot_instances;
pub(in crate::attention) use plan::{MAX_WIDTH, STEP, missing_support, shared_memory};

use forward::mma_forward;
use keys::mma_keys;
use plan::{CHUNK, MmaShape, PAIR, plan};
use queries::mma_queries;

use super::super::problem::AttentionProblem;
use super::AttentionCall;
use super::launch::{KeyTarget, LaunchArgs, Tiles, launch};
use super::tile::DeviceStridesLaunch;
use crate::gradient::Place;

/// Outputs as [`AttentionForwardOp`](super::super::ops::AttentionForwardOp) has them.
pub(in crate::attention) fn forward(
    problem: &AttentionProblem,
    inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    AttentionCall::new(problem, aligned(problem, inputs), None, plan).forward()
}

/// Outputs as [`AttentionBackwardOp`](super::super::ops::AttentionBackwardOp) has them.
pub(in crate::attention) fn backward(
    problem: &AttentionProblem,
    inputs: Vec<CubeTensor>,
    places: Option<[Place; 2]>,
) -> Vec<CubeTensor> {
    AttentionCall::new(problem, aligned(problem, inputs), places, plan).backward()
}

/// The inputs with projections whose rows start at multiples of 16 bytes: `cp.async` copies no less.
/// A projection of other strides is copied.
fn aligned(problem: &AttentionProblem, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let rest = inputs.split_off(if problem.packed { 1 } else { 3 });
    let is_aligned = |tensor: &CubeTensor| {
        let strides = tensor.meta.strides();
        let (last, others) = strides.split_last().unwrap_or((&1, &[]));
        *last == 1 && others.iter().all(|stride| stride.is_multiple_of(CHUNK))
    };
    let projections = inputs.into_iter().map(|tensor| {
        if is_aligned(&tensor) {
            tensor
        } else {
            into_contiguous(tensor)
        }
    });
    projections.chain(rest).collect()
}

impl Tiles for MmaShape {
    fn rows(&self) -> usize {
        self.rows()
    }

    fn forward(
        args: LaunchArgs<Self>,
        sink: ComptimeOptionArgs<OwnedTensor<f32>>,
        [out, lse]: [BufferArg; 2],
    ) {
        launch!(mma_forward, args, [], [sink], [out, lse], [], [args.dtype])
    }

    fn queries(
        args: LaunchArgs<Self>,
        [dout, lse, delta]: [BufferArg; 3],
        dq: BufferArg,
        strides: DeviceStridesLaunch,
    ) {
        launch!(
            mma_queries,
            args,
            [],
            [dout, lse, delta],
            [dq],
            [strides],
            [args.dtype]
        )
    }

    fn keys(args: LaunchArgs<Self>, [dout, lse, delta]: [BufferArg; 3], target: KeyTarget) {
        let vector = if target.is_flat { PAIR } else { args.vector };
        let [dk, dv] = target.strides(vector);
        launch!(
            mma_keys,
            args,
            [vector],
            [dout, lse, delta],
            [target.buffer],
            [dk, dv],
            [target.is_flat, target.add, [args.dtype, target.dtype]]
        )
    }
}
