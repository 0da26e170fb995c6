//! Attention on CubeCL devices: tiles in shared memory, sums in registers.
//!
//! The kernels multiply in f32 on the scalar units. They read queries, keys and values in place,
//! with any strides between rows.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::{ComptimeOptionArgs, CubeDim};

mod aot_instances;
mod backward;
mod forward;
pub(super) mod matrix;
mod plan;
mod tile;

pub(crate) use aot_instances::aot_instances;

use backward::{attention_delta, attention_keys, attention_queries, attention_sink};
use forward::attention_forward;
use plan::TilePlan;
use tile::{DeviceMaskRangeLaunch, DeviceStridesLaunch, LANES, TileShape};

use super::mask::MaskRange;
use super::ops::HeadStrides;
use super::problem::AttentionProblem;
use crate::cpu::wide;
use crate::cube::{Reduction, empty, grid};

/// Outputs as [`AttentionForwardOp`](super::ops::AttentionForwardOp) has them.
pub(super) fn forward(problem: &AttentionProblem, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let (call, mut rest) = AttentionCall::new(problem, inputs);
    let sink = problem.sink.then(|| rest.remove(0));
    let bounds = rest.pop();
    let like = &call.tensors[0];
    let out = empty(like, problem.out_shape(), problem.dtype);
    let lse = empty(like, problem.lse_shape(), wide(problem.dtype));
    let range = MaskRange::new(problem.queries, problem.keys, &problem.options);
    let shape = call.plan.forward;
    let [q, k, v] = call.head_strides;
    unsafe {
        attention_forward::launch_unchecked(
            &like.client,
            grid(
                &like.client,
                call.cubes(problem.queries, problem.heads.heads, shape),
            ),
            CubeDim::new_1d(shape.units() as u32),
            call.plan.vector,
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
            shape,
            dtype_to_storage_type(problem.dtype),
        );
    }
    vec![out, lse]
}

/// Outputs as [`AttentionBackwardOp`](super::ops::AttentionBackwardOp) has them.
pub(super) fn backward(problem: &AttentionProblem, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let (call, rest) = AttentionCall::new(problem, inputs);
    call.gradients(
        rest,
        |statistics, bounds, dq| call.queries(statistics, bounds, dq),
        |statistics, bounds, gradients| call.keys(statistics, bounds, gradients),
    )
}

/// One problem on one device.
#[derive(Debug)]
struct AttentionCall<'a> {
    problem: &'a AttentionProblem,
    tensors: Vec<CubeTensor>,
    head_strides: [HeadStrides; 3],
    gradients: [HeadStrides; 3],
    out: HeadStrides,
    plan: TilePlan,
}

impl<'a> AttentionCall<'a> {
    /// The call, and the inputs after the projections, contiguous.
    fn new(problem: &'a AttentionProblem, mut inputs: Vec<CubeTensor>) -> (Self, Vec<CubeTensor>) {
        let rest = inputs.split_off(if problem.packed { 1 } else { 3 });
        let tensors: Vec<_> = inputs.into_iter().map(readable).collect();
        let layouts: Vec<_> = tensors
            .iter()
            .map(|tensor| (0, tensor.meta.strides().iter().copied().collect()))
            .collect();
        let head_strides = problem.head_strides(&layouts);
        let row = problem.heads.heads * problem.heads.width;
        let out = HeadStrides {
            offset: 0,
            batch: problem.queries * row,
            row,
            head: problem.heads.width,
        };
        let gradients = problem.gradient_strides();
        let all: Vec<_> = head_strides.into_iter().chain(gradients).collect();
        let plan = TilePlan::new(&tensors[0].client, problem, &all);
        let call = Self {
            problem,
            tensors,
            head_strides,
            gradients,
            out,
            plan,
        };
        (call, rest.into_iter().map(into_contiguous).collect())
    }

    /// The tensor of the queries (0), keys (1) or values (2).
    fn projection(&self, part: usize) -> CubeTensor {
        self.tensors[part.min(self.tensors.len() - 1)].clone()
    }

    /// All gradients, from the inputs after the projections. `queries` and `keys` launch the
    /// kernels of the gradients of queries, and of keys and values. Their arguments are the
    /// gradient of the output, the log-sum-exp and delta, then the document bounds.
    fn gradients(
        &self,
        mut rest: Vec<CubeTensor>,
        queries: impl FnOnce(&[CubeTensor; 3], &Option<CubeTensor>, &CubeTensor),
        keys: impl FnOnce(&[CubeTensor; 3], &Option<CubeTensor>, &CubeTensor),
    ) -> Vec<CubeTensor> {
        let problem = self.problem;
        let (out, lse, dout) = (rest.remove(0), rest.remove(0), rest.remove(0));
        let sink = problem.sink.then(|| rest.remove(0));
        let bounds = rest.pop();
        let delta = self.delta(out, &dout);
        let like = &self.tensors[0];
        let mut outputs = if problem.packed {
            vec![empty(like, like.shape(), problem.dtype)]
        } else {
            vec![
                empty(like, problem.out_shape(), problem.dtype),
                empty(like, problem.pair_shape(), problem.dtype),
            ]
        };
        let statistics = [dout, lse, delta];
        queries(&statistics, &bounds, &outputs[0]);
        keys(&statistics, &bounds, &outputs[outputs.len() - 1]);
        if let Some(sink) = sink {
            let [_, lse, delta] = statistics;
            outputs.push(self.sink(sink, lse, delta));
        }
        outputs
    }

    fn heads_per_group(&self) -> u32 {
        (self.problem.heads.heads / self.problem.heads.groups) as u32
    }

    fn cubes(&self, rows: usize, heads: usize, shape: TileShape) -> usize {
        rows.div_ceil(shape.rows) * heads * self.problem.batch
    }

    fn device_strides(&self, strides: HeadStrides) -> DeviceStridesLaunch {
        let vectors = |elements: usize| (elements / self.plan.vector) as u32;
        DeviceStridesLaunch::new(
            vectors(strides.offset),
            vectors(strides.batch),
            vectors(strides.row),
            vectors(strides.head),
        )
    }

    /// `[batch, heads, queries]`: the sum of `out * dout` over a row.
    fn delta(&self, out: CubeTensor, dout: &CubeTensor) -> CubeTensor {
        const UNITS: u32 = 256;
        let problem = self.problem;
        let delta = empty(&out, problem.lse_shape(), wide(problem.dtype));
        let rows = problem.batch * problem.queries * problem.heads.heads;
        let client = out.client.clone();
        unsafe {
            attention_delta::launch_unchecked(
                &client,
                grid(&client, rows.div_ceil(UNITS as usize / LANES)),
                CubeDim::new_1d(UNITS),
                self.plan.vector,
                out.into_buffer_arg(),
                dout.clone().into_buffer_arg(),
                delta.clone().into_buffer_arg(),
                rows as u32,
                problem.queries as u32,
                problem.heads.heads as u32,
                problem.heads.width / self.plan.vector,
                UNITS,
                dtype_to_storage_type(problem.dtype),
            );
        }
        delta
    }

    fn queries(
        &self,
        [dout, lse, delta]: &[CubeTensor; 3],
        bounds: &Option<CubeTensor>,
        dq: &CubeTensor,
    ) {
        let problem = self.problem;
        let shape = self.plan.backward;
        let range = MaskRange::new(problem.queries, problem.keys, &problem.options);
        let cubes = self.cubes(problem.queries, problem.heads.heads, shape);
        let [q, k, v] = self.head_strides;
        unsafe {
            attention_queries::launch_unchecked(
                &dq.client,
                grid(&dq.client, cubes),
                CubeDim::new_1d(shape.units() as u32),
                self.plan.vector,
                self.projection(0).into_buffer_arg(),
                self.projection(1).into_buffer_arg(),
                self.projection(2).into_buffer_arg(),
                dout.clone().into_buffer_arg(),
                lse.clone().into_buffer_arg(),
                delta.clone().into_buffer_arg(),
                ComptimeOptionArgs::from(bounds.clone().map(CubeTensor::into_tensor_arg)),
                dq.clone().into_buffer_arg(),
                self.device_strides(q),
                self.device_strides(k),
                self.device_strides(v),
                self.device_strides(self.out),
                self.device_strides(self.gradients[0]),
                mask_range(range, problem.queries),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                self.heads_per_group(),
                shape,
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
        let problem = self.problem;
        let shape = self.plan.backward;
        let range = MaskRange::new(problem.queries, problem.keys, &problem.options);
        let cubes = self.cubes(problem.keys, problem.heads.groups, shape);
        let [q, k, v] = self.head_strides;
        unsafe {
            attention_keys::launch_unchecked(
                &gradients.client,
                grid(&gradients.client, cubes),
                CubeDim::new_1d(shape.units() as u32),
                self.plan.vector,
                self.projection(0).into_buffer_arg(),
                self.projection(1).into_buffer_arg(),
                self.projection(2).into_buffer_arg(),
                dout.clone().into_buffer_arg(),
                lse.clone().into_buffer_arg(),
                delta.clone().into_buffer_arg(),
                ComptimeOptionArgs::from(bounds.clone().map(CubeTensor::into_tensor_arg)),
                gradients.clone().into_buffer_arg(),
                self.device_strides(q),
                self.device_strides(k),
                self.device_strides(v),
                self.device_strides(self.out),
                self.device_strides(self.gradients[1]),
                self.device_strides(self.gradients[2]),
                mask_range(range.transposed(problem.queries), problem.keys),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                self.heads_per_group(),
                shape,
                dtype_to_storage_type(problem.dtype),
            );
        }
    }

    fn sink(&self, sink: CubeTensor, lse: CubeTensor, delta: CubeTensor) -> CubeTensor {
        let problem = self.problem;
        let heads = problem.heads.heads;
        let dsink = empty(&sink, [heads], wide(problem.dtype));
        let client = sink.client.clone();
        let units = client.properties().hardware.plane_size_max.max(256);
        unsafe {
            attention_sink::launch_unchecked(
                &client,
                grid(&client, heads),
                CubeDim::new_1d(units),
                sink.into_buffer_arg(),
                lse.into_buffer_arg(),
                delta.into_buffer_arg(),
                dsink.clone().into_buffer_arg(),
                problem.batch as u32,
                heads as u32,
                problem.queries as u32,
                units,
                self.plan.reduction == Reduction::Planes,
            );
        }
        dsink
    }
}

fn mask_range(range: MaskRange, rows: usize) -> DeviceMaskRangeLaunch {
    DeviceMaskRangeLaunch::new(
        range.shift,
        range.before,
        range.after,
        range.columns,
        rows as i32,
    )
}

/// The tensor itself if rows of a head are contiguous, otherwise a copy.
fn readable(tensor: CubeTensor) -> CubeTensor {
    match tensor.meta.strides().last() {
        Some(1) => tensor,
        _ => into_contiguous(tensor),
    }
}
