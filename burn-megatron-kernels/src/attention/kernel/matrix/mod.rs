//! Attention by matrix units: cooperative products of 16 by 16 by 16 with sums in f32.
//!
//! The kernels are those of the parent module with other tiles: tiles keep the type of the inputs,
//! a plane owns a warp tile of 16 rows, and weights are rounded to that type before they are
//! multiplied by the values, as in FlashAttention-2. Delta and the gradient of the sink are
//! computed by the kernels of the parent module.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::{ComptimeOptionArgs, CubeDim};

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
use plan::{MatrixTiles, blocks};
use queries::matrix_queries;

use super::super::mask::MaskRange;
use super::super::problem::AttentionProblem;
use super::plan::vector;
use super::{AttentionCall, mask_range};
use crate::cpu::wide;
use crate::cube::{empty, grid};

/// Elements of a load of 128 bits.
const MAX_VECTOR: usize = 8;

/// Outputs as [`AttentionForwardOp`](super::super::ops::AttentionForwardOp) has them.
pub(in crate::attention) fn forward(
    problem: &AttentionProblem,
    products: TileMultiplier,
    inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let (call, mut rest) = AttentionCall::new(problem, inputs);
    let matrices = MatrixCall::new(call, products);
    let sink = problem.sink.then(|| rest.remove(0));
    matrices.forward(sink, rest.pop())
}

/// Outputs as [`AttentionBackwardOp`](super::super::ops::AttentionBackwardOp) has them.
pub(in crate::attention) fn backward(
    problem: &AttentionProblem,
    products: TileMultiplier,
    inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let (call, rest) = AttentionCall::new(problem, inputs);
    let matrices = MatrixCall::new(call, products);
    matrices.call.gradients(
        rest,
        |statistics, bounds, dq| matrices.queries(statistics, bounds, dq),
        |statistics, bounds, gradients| matrices.keys(statistics, bounds, gradients),
    )
}

/// A call, and the tiles of both directions.
#[derive(Debug)]
struct MatrixCall<'a> {
    call: AttentionCall<'a>,
    forward: MatrixTiles,
    backward: MatrixTiles,
}

impl<'a> MatrixCall<'a> {
    fn new(mut call: AttentionCall<'a>, products: TileMultiplier) -> Self {
        let problem = call.problem;
        let client = &call.tensors[0].client;
        let head_strides = [call.head_strides, call.gradients].concat();
        let width = problem.heads.width;
        let vector = vector(client, problem.dtype, width, &head_strides, MAX_VECTOR);
        let memory = client.properties().hardware.max_shared_memory_size;
        let [forward, backward] = blocks(width, vector, memory, products);
        call.plan.vector = vector;
        Self {
            call,
            forward,
            backward,
        }
    }

    fn cubes(&self, rows: usize, heads: usize, blocks: MatrixTiles) -> usize {
        rows.div_ceil(blocks.rows()) * heads * self.call.problem.batch
    }

    fn forward(&self, sink: Option<CubeTensor>, bounds: Option<CubeTensor>) -> Vec<CubeTensor> {
        let call = &self.call;
        let problem = call.problem;
        let like = &call.tensors[0];
        let out = empty(like, problem.out_shape(), problem.dtype);
        let lse = empty(like, problem.lse_shape(), wide(problem.dtype));
        let range = MaskRange::new(problem.queries, problem.keys, &problem.options);
        let blocks = self.forward;
        let cubes = self.cubes(problem.queries, problem.heads.heads, blocks);
        let [q, k, v] = call.head_strides;
        unsafe {
            matrix_forward::launch_unchecked(
                &like.client,
                grid(&like.client, cubes),
                CubeDim::new_1d(blocks.units() as u32),
                blocks.vector,
                call.projection(0).into_buffer_arg(),
                call.projection(1).into_buffer_arg(),
                call.projection(2).into_buffer_arg(),
                ComptimeOptionArgs::from(sink.map(CubeTensor::into_tensor_arg)),
                ComptimeOptionArgs::from(bounds.map(CubeTensor::into_tensor_arg)),
                out.clone().into_buffer_arg(),
                lse.clone().into_buffer_arg(),
                call.device_strides(q),
                call.device_strides(k),
                call.device_strides(v),
                call.device_strides(call.out),
                mask_range(range, problem.queries),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                call.heads_per_group(),
                blocks,
                dtype_to_storage_type(problem.dtype),
            );
        }
        vec![out, lse]
    }

    fn queries(
        &self,
        [dout, lse, delta]: &[CubeTensor; 3],
        bounds: &Option<CubeTensor>,
        dq: &CubeTensor,
    ) {
        let call = &self.call;
        let problem = call.problem;
        let range = MaskRange::new(problem.queries, problem.keys, &problem.options);
        let blocks = self.backward;
        let cubes = self.cubes(problem.queries, problem.heads.heads, blocks);
        let [q, k, v] = call.head_strides;
        unsafe {
            matrix_queries::launch_unchecked(
                &dq.client,
                grid(&dq.client, cubes),
                CubeDim::new_1d(blocks.units() as u32),
                blocks.vector,
                call.projection(0).into_buffer_arg(),
                call.projection(1).into_buffer_arg(),
                call.projection(2).into_buffer_arg(),
                dout.clone().into_buffer_arg(),
                lse.clone().into_buffer_arg(),
                delta.clone().into_buffer_arg(),
                ComptimeOptionArgs::from(bounds.clone().map(CubeTensor::into_tensor_arg)),
                dq.clone().into_buffer_arg(),
                call.device_strides(q),
                call.device_strides(k),
                call.device_strides(v),
                call.device_strides(call.out),
                call.device_strides(call.gradients[0]),
                mask_range(range, problem.queries),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                call.heads_per_group(),
                blocks,
                dtype_to_storage_type(problem.dtype),
            );
        }
    }

    fn keys(
        &self,
        [dout, lse, delta]: &[CubeTensor; 3],
        bounds: &Option<CubeTensor>,
        gradients: &CubeTensor,
    ) {
        let call = &self.call;
        let problem = call.problem;
        let range = MaskRange::new(problem.queries, problem.keys, &problem.options);
        let blocks = self.backward;
        let cubes = self.cubes(problem.keys, problem.heads.groups, blocks);
        let [q, k, v] = call.head_strides;
        unsafe {
            matrix_keys::launch_unchecked(
                &gradients.client,
                grid(&gradients.client, cubes),
                CubeDim::new_1d(blocks.units() as u32),
                blocks.vector,
                call.projection(0).into_buffer_arg(),
                call.projection(1).into_buffer_arg(),
                call.projection(2).into_buffer_arg(),
                dout.clone().into_buffer_arg(),
                lse.clone().into_buffer_arg(),
                delta.clone().into_buffer_arg(),
                ComptimeOptionArgs::from(bounds.clone().map(CubeTensor::into_tensor_arg)),
                gradients.clone().into_buffer_arg(),
                call.device_strides(q),
                call.device_strides(k),
                call.device_strides(v),
                call.device_strides(call.out),
                call.device_strides(call.gradients[1]),
                call.device_strides(call.gradients[2]),
                mask_range(range.transposed(problem.queries), problem.keys),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                call.heads_per_group(),
                blocks,
                dtype_to_storage_type(problem.dtype),
            );
        }
    }
}
