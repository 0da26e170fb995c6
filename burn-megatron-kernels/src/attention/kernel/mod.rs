//! Attention on CubeCL devices: tiles in shared memory, sums in registers.
//!
//! The kernels multiply in f32 on the scalar units. They read queries, keys and values in place,
//! with any strides between rows.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

mod aot_instances;
mod backward;
mod forward;
mod launch;
pub(super) mod matrix;
pub(super) mod mma;
mod plan;
mod tile;

pub(crate) use aot_instances::aot_instances;

use backward::{attention_delta, attention_keys, attention_queries, attention_sink};
use forward::attention_forward;
use launch::{LaunchArgs, Tiles, launch};
use plan::TilePlan;
use tile::{
    AttentionSizesLaunch, AttentionStridesLaunch, DeviceMaskRangeLaunch, DeviceStridesLaunch,
    LANES, TileShape,
};

use super::mask::MaskRange;
use super::ops::HeadStrides;
use super::problem::AttentionProblem;
use crate::cpu::wide;
use crate::cube::{Reduction, RowPlan, empty, grid};

/// Outputs as [`AttentionForwardOp`](super::ops::AttentionForwardOp) has them.
pub(super) fn forward(problem: &AttentionProblem, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    AttentionCall::new(problem, inputs, TilePlan::new).forward()
}

/// Outputs as [`AttentionBackwardOp`](super::ops::AttentionBackwardOp) has them.
pub(super) fn backward(problem: &AttentionProblem, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    AttentionCall::new(problem, inputs, TilePlan::new).backward()
}

impl Tiles for TileShape {
    fn rows(&self) -> usize {
        self.rows
    }

    fn forward(
        args: LaunchArgs<Self>,
        sink: ComptimeOptionArgs<OwnedTensor<f32>>,
        [out, lse]: [BufferArg; 2],
    ) {
        launch!(attention_forward, args, [sink], [out, lse], [])
    }

    fn queries(
        args: LaunchArgs<Self>,
        [dout, lse, delta]: [BufferArg; 3],
        dq: BufferArg,
        strides: DeviceStridesLaunch,
    ) {
        launch!(attention_queries, args, [dout, lse, delta], [dq], [strides])
    }

    fn keys(
        args: LaunchArgs<Self>,
        [dout, lse, delta]: [BufferArg; 3],
        gradients: BufferArg,
        [dk, dv]: [DeviceStridesLaunch; 2],
    ) {
        launch!(
            attention_keys,
            args,
            [dout, lse, delta],
            [gradients],
            [dk, dv]
        )
    }
}

/// One problem on one device.
#[derive(Debug)]
struct AttentionCall<'a, T> {
    problem: &'a AttentionProblem,
    projections: Vec<CubeTensor>,
    /// The inputs after the projections, contiguous.
    rest: Vec<CubeTensor>,
    head_strides: [HeadStrides; 3],
    gradients: [HeadStrides; 3],
    plan: TilePlan<T>,
}

impl<'a, T: Tiles> AttentionCall<'a, T> {
    fn new(
        problem: &'a AttentionProblem,
        mut inputs: Vec<CubeTensor>,
        plan: impl FnOnce(&Client, &AttentionProblem, &[HeadStrides]) -> TilePlan<T>,
    ) -> Self {
        let rest = inputs.split_off(if problem.packed { 1 } else { 3 });
        let projections: Vec<_> = inputs.into_iter().map(readable).collect();
        let layouts: Vec<_> = projections
            .iter()
            .map(|tensor| (0, tensor.meta.strides().iter().copied().collect()))
            .collect();
        let head_strides = problem.head_strides(&layouts);
        let gradients = problem.gradient_strides();
        let all = [head_strides, gradients].concat();
        Self {
            problem,
            plan: plan(&projections[0].client, problem, &all),
            projections,
            rest: rest.into_iter().map(into_contiguous).collect(),
            head_strides,
            gradients,
        }
    }

    fn forward(mut self) -> Vec<CubeTensor> {
        let problem = self.problem;
        let sink = problem.sink.then(|| self.rest.remove(0));
        let bounds = self.rest.pop();
        let like = &self.projections[0];
        let out = empty(like, problem.out_shape(), problem.dtype);
        let lse = empty(like, problem.lse_shape(), wide(problem.dtype));
        T::forward(
            self.of_queries(self.plan.forward, bounds),
            ComptimeOptionArgs::from(sink.map(CubeTensor::into_tensor_arg)),
            [&out, &lse].map(buffer),
        );
        vec![out, lse]
    }

    fn backward(mut self) -> Vec<CubeTensor> {
        let problem = self.problem;
        let mut rest = std::mem::take(&mut self.rest);
        let (out, lse, dout) = (rest.remove(0), rest.remove(0), rest.remove(0));
        let sink = problem.sink.then(|| rest.remove(0));
        let bounds = rest.pop();
        let delta = self.delta(out, &dout);
        let like = &self.projections[0];
        let mut outputs = if problem.packed {
            vec![empty(like, like.shape(), problem.dtype)]
        } else {
            vec![
                empty(like, problem.out_shape(), problem.dtype),
                empty(like, problem.pair_shape(), problem.dtype),
            ]
        };
        let statistics = || [&dout, &lse, &delta].map(buffer);
        let [dq, dk, dv] = self.gradients.map(|strides| self.device_strides(strides));
        T::queries(
            self.of_queries(self.plan.queries, bounds.clone()),
            statistics(),
            buffer(&outputs[0]),
            dq,
        );
        T::keys(
            self.of_keys(self.plan.keys, bounds),
            statistics(),
            buffer(&outputs[outputs.len() - 1]),
            [dk, dv],
        );
        if let Some(sink) = sink {
            outputs.push(self.sink(sink, lse, delta));
        }
        outputs
    }

    /// The arguments of a kernel with resident queries.
    fn of_queries(&self, tiles: T, bounds: Option<CubeTensor>) -> LaunchArgs<T> {
        let (queries, heads) = (self.problem.queries, self.problem.heads.heads);
        self.launch_args(tiles, queries, heads, self.mask_range(), bounds)
    }

    /// The arguments of a kernel with resident keys.
    fn of_keys(&self, tiles: T, bounds: Option<CubeTensor>) -> LaunchArgs<T> {
        let (keys, groups) = (self.problem.keys, self.problem.heads.groups);
        let range = self.mask_range().transposed(self.problem.queries);
        self.launch_args(tiles, keys, groups, range, bounds)
    }

    fn mask_range(&self) -> MaskRange {
        let problem = self.problem;
        MaskRange::new(problem.queries, problem.keys, &problem.options)
    }

    fn launch_args(
        &self,
        tiles: T,
        rows: usize,
        heads: usize,
        range: MaskRange,
        bounds: Option<CubeTensor>,
    ) -> LaunchArgs<T> {
        let problem = self.problem;
        let last = self.projections.len() - 1;
        let row = problem.heads.heads * problem.heads.width;
        let out = HeadStrides {
            offset: 0,
            batch: problem.queries * row,
            row,
            head: problem.heads.width,
        };
        let [q, k, v] = self
            .head_strides
            .map(|strides| self.device_strides(strides));
        LaunchArgs {
            client: self.projections[0].client.clone(),
            cubes: rows.div_ceil(tiles.rows()) * heads * problem.batch,
            tiles,
            vector: self.plan.vector,
            projections: [0, 1, 2].map(|part| buffer(&self.projections[part.min(last)])),
            bounds: ComptimeOptionArgs::from(bounds.map(CubeTensor::into_tensor_arg)),
            strides: AttentionStridesLaunch::new(q, k, v, self.device_strides(out)),
            sizes: AttentionSizesLaunch::new(
                DeviceMaskRangeLaunch::new(
                    range.shift,
                    range.before,
                    range.after,
                    range.columns,
                    rows as i32,
                ),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                (problem.heads.heads / problem.heads.groups) as u32,
            ),
            dtype: dtype_to_storage_type(problem.dtype),
        }
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

    fn sink(&self, sink: CubeTensor, lse: CubeTensor, delta: CubeTensor) -> CubeTensor {
        let problem = self.problem;
        let heads = problem.heads.heads;
        let dsink = empty(&sink, [heads], wide(problem.dtype));
        let client = sink.client.clone();
        let reduction = RowPlan::new(&client, problem.dtype, problem.heads.width).reduction;
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
                reduction == Reduction::Planes,
            );
        }
        dsink
    }
}

fn buffer(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

/// The tensor itself if rows of a head are contiguous, otherwise a copy.
fn readable(tensor: CubeTensor) -> CubeTensor {
    match tensor.meta.strides().last() {
        Some(1) => tensor,
        _ => into_contiguous(tensor),
    }
}
