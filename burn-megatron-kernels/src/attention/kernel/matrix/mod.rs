//! Attention by matrix units: cooperative products of 16 by 16 by 16 with sums in f32.
//!
//! The kernels are those of the parent module with other tiles: these are kept in the type of the
//! inputs, a plane owns a strip of 16 rows, and weights are rounded to that type before they meet
//! the values, as in FlashAttention-2. Delta and the gradient of the sink are the parent's.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::{ComptimeOptionArgs, CubeDim};

mod forward;
mod keys;
mod plan;
mod queries;
mod specimens;
mod strip;
mod tile;

pub(in crate::attention) use plan::{MAX_WIDTH, Products, TILE, lacks};
pub(super) use specimens::specimens;

use forward::matrix_forward;
use keys::matrix_keys;
use plan::{Blocks, blocks};
use queries::matrix_queries;

use super::super::problem::Problem;
use super::super::visible::Band;
use super::plan::vector;
use super::{Call, reach};
use crate::cpu::wide;
use crate::cube::{empty, grid};

/// Elements of a load of 128 bits.
const WIDEST: usize = 8;

/// Outputs as [`Forward`](super::super::portable::Forward) has them.
pub(in crate::attention) fn forward(
    problem: &Problem,
    products: Products,
    inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let (call, mut rest) = Call::new(problem, inputs);
    let matrices = Matrices::new(call, products);
    let sink = problem.sink.then(|| rest.remove(0));
    matrices.forward(sink, rest.pop())
}

/// Outputs as [`Backward`](super::super::portable::Backward) has them.
pub(in crate::attention) fn backward(
    problem: &Problem,
    products: Products,
    inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let (call, rest) = Call::new(problem, inputs);
    let matrices = Matrices::new(call, products);
    matrices.call.gradients(
        rest,
        |statistics, bounds, dq| matrices.queries(statistics, bounds, dq),
        |statistics, bounds, gradients| matrices.keys(statistics, bounds, gradients),
    )
}

/// A call, and the tiles of both directions.
#[derive(Debug)]
struct Matrices<'a> {
    call: Call<'a>,
    forward: Blocks,
    backward: Blocks,
}

impl<'a> Matrices<'a> {
    fn new(mut call: Call<'a>, products: Products) -> Self {
        let problem = call.problem;
        let client = &call.tensors[0].client;
        let places = [call.places, call.gradients].concat();
        let width = problem.heads.width;
        let vector = vector(client, problem.dtype, width, &places, WIDEST);
        let memory = client.properties().hardware.max_shared_memory_size;
        let [forward, backward] = blocks(width, vector, memory, products);
        call.plan.vector = vector;
        Self {
            call,
            forward,
            backward,
        }
    }

    fn cubes(&self, rows: usize, heads: usize, blocks: Blocks) -> usize {
        rows.div_ceil(blocks.rows()) * heads * self.call.problem.batch
    }

    fn forward(&self, sink: Option<CubeTensor>, bounds: Option<CubeTensor>) -> Vec<CubeTensor> {
        let call = &self.call;
        let problem = call.problem;
        let like = &call.tensors[0];
        let out = empty(like, problem.out_shape(), problem.dtype);
        let lse = empty(like, problem.lse_shape(), wide(problem.dtype));
        let band = Band::new(problem.queries, problem.keys, &problem.options);
        let blocks = self.forward;
        let cubes = self.cubes(problem.queries, problem.heads.heads, blocks);
        let [q, k, v] = call.places;
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
                call.site(q),
                call.site(k),
                call.site(v),
                call.site(call.out),
                reach(band, problem.queries),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                call.share(),
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
        let band = Band::new(problem.queries, problem.keys, &problem.options);
        let blocks = self.backward;
        let cubes = self.cubes(problem.queries, problem.heads.heads, blocks);
        let [q, k, v] = call.places;
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
                call.site(q),
                call.site(k),
                call.site(v),
                call.site(call.out),
                call.site(call.gradients[0]),
                reach(band, problem.queries),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                call.share(),
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
        let band = Band::new(problem.queries, problem.keys, &problem.options);
        let blocks = self.backward;
        let cubes = self.cubes(problem.keys, problem.heads.groups, blocks);
        let [q, k, v] = call.places;
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
                call.site(q),
                call.site(k),
                call.site(v),
                call.site(call.out),
                call.site(call.gradients[1]),
                call.site(call.gradients[2]),
                reach(band.transposed(problem.queries), problem.keys),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                call.share(),
                blocks,
                dtype_to_storage_type(problem.dtype),
            );
        }
    }
}
