//! Attention on CubeCL devices: tiles in shared memory, sums in registers.
//!
//! The kernels multiply in f32 without tensor cores. They read queries, keys and values without copying them, with any
//! strides between rows.

use std::collections::VecDeque;

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
pub(super) mod mma;
mod plan;
mod tile;

pub(crate) use aot_instances::aot_instances;

use backward::{attention_delta, attention_keys, attention_queries, attention_sink};
use forward::attention_forward;
use launch::{KeyTarget, LaunchArgs, Tiles, in_vectors, tiles};
use plan::TilePlan;
use tile::{
    AttentionSizesLaunch, AttentionStridesLaunch, DeviceMaskRangeLaunch, DeviceStridesLaunch,
    LANES, TileShape,
};

use super::mask::MaskRange;
use super::ops::{AttentionOp, HeadStrides, Kernels, Pass};
use super::problem::AttentionProblem;
use crate::cpu::wide;
use crate::cube::{KernelTensor, RowPlan, empty, launch, own};
use crate::gradient::Place;

/// Runs the forward or the backward pass. See [`Pass`] for inputs and outputs.
pub(super) fn run(op: &AttentionOp, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    match op.kernels {
        Kernels::Portable => AttentionCall::new(op, inputs, TilePlan::new).run(),
        Kernels::Mma => {
            let inputs = mma::aligned(&op.problem, inputs);
            AttentionCall::new(op, inputs, mma::plan).run()
        }
    }
}

tiles!(
    TileShape,
    |tiles: &Self| [tiles.rows, tiles.units()],
    attention_forward,
    attention_queries,
    attention_keys,
    []
);

/// An attention problem with its inputs on one device.
#[derive(Debug)]
struct AttentionCall<'a, T> {
    problem: &'a AttentionProblem,
    pass: Pass,
    projections: Vec<CubeTensor>,
    /// The contiguous inputs that follow the projections.
    rest: VecDeque<CubeTensor>,
    /// The places of the gradients of keys and values in a flat buffer.
    places: Option<[Place; 2]>,
    head_strides: [HeadStrides; 3],
    gradients: [HeadStrides; 3],
    plan: TilePlan<T>,
}

impl<'a, T: Tiles> AttentionCall<'a, T> {
    fn new(
        op: &'a AttentionOp,
        mut inputs: Vec<CubeTensor>,
        plan: impl FnOnce(&Client, &AttentionProblem, &[HeadStrides]) -> TilePlan<T>,
    ) -> Self {
        let (problem, pass) = (&op.problem, op.pass);
        let places = match pass {
            Pass::Forward => None,
            Pass::Backward { places } => places,
        };
        let rest = inputs.split_off(problem.projections());
        let projections: Vec<_> = inputs.into_iter().map(readable).collect();
        let layouts: Vec<_> = projections
            .iter()
            .map(|tensor| (0, tensor.meta.strides().iter().copied().collect()))
            .collect();
        let head_strides = problem.head_strides(&layouts);
        let gradients = problem.gradient_strides(places);
        let all = [head_strides, gradients].concat();
        Self {
            problem,
            pass,
            plan: plan(&projections[0].client, problem, &all),
            projections,
            rest: rest.into_iter().map(into_contiguous).collect(),
            places,
            head_strides,
            gradients,
        }
    }

    /// Returns the next input.
    fn next(&mut self) -> CubeTensor {
        match self.rest.pop_front() {
            Some(tensor) => tensor,
            None => unreachable!("the problem says how many inputs there are"),
        }
    }

    fn run(self) -> Vec<CubeTensor> {
        match self.pass {
            Pass::Forward => self.forward(),
            Pass::Backward { .. } => self.backward(),
        }
    }

    fn forward(mut self) -> Vec<CubeTensor> {
        let problem = self.problem;
        let sink = problem.sink.then(|| self.next());
        let bounds = problem.options.ranges.is_some().then(|| self.next());
        let like = &self.projections[0];
        let out = empty(like, problem.out_shape(), problem.dtype);
        let shape = problem.statistics_shape();
        let lse = empty(like, shape, wide(problem.dtype));
        let args = self.of_queries(self.plan.forward, bounds);
        let outputs = [&out, &lse].map(buffer);
        T::forward(args, sink.argument(), outputs, problem.with_max);
        vec![out, lse]
    }

    fn backward(mut self) -> Vec<CubeTensor> {
        let problem = self.problem;
        let [out, lse, dout] = [(); 3].map(|()| self.next());
        let sink = problem.sink.then(|| self.next());
        let ranges = problem.options.ranges.as_ref();
        let [of_queries, of_keys] = [(); 2].map(|()| ranges.map(|_| self.next()));
        let flat = self.places.map(|_| own(self.next()));
        let delta = self.delta(out, &dout);
        let like = &self.projections[0];
        let mut outputs = if problem.packed {
            vec![empty(like, like.shape(), problem.dtype)]
        } else {
            let of_keys = || empty(like, [problem.key_elements()], problem.dtype);
            vec![
                empty(like, problem.q_shape(), problem.dtype),
                flat.unwrap_or_else(of_keys),
            ]
        };
        let statistics = || [&dout, &lse, &delta].map(buffer);
        let [dq, dk, dv] = self.gradients;
        T::queries(
            self.of_queries(self.plan.queries, of_queries),
            statistics(),
            buffer(&outputs[0]),
            in_vectors(dq, self.plan.vector),
        );
        let gradients = &outputs[outputs.len() - 1];
        let is_flat = self.places.is_some();
        let vector = if is_flat {
            self.plan.flat_vector
        } else {
            self.plan.vector
        };
        let add = self.places.map(|places| places.map(|place| place.add));
        for tiles in &self.plan.keys {
            let target = KeyTarget {
                buffer: buffer(gradients),
                dtype: dtype_to_storage_type(gradients.dtype),
                vector,
                strides: [dk, dv].map(|strides| in_vectors(strides, vector)),
                add: add.unwrap_or_default(),
                is_flat,
            };
            T::keys(self.of_keys(*tiles, of_keys.clone()), statistics(), target);
        }
        if let Some(sink) = sink {
            outputs.push(self.sink(sink, lse, delta));
        }
        outputs
    }

    /// Returns the arguments of a kernel with resident queries.
    fn of_queries(&self, tiles: T, bounds: Option<CubeTensor>) -> LaunchArgs<T> {
        let (queries, heads) = (self.problem.queries, self.problem.heads.heads);
        self.launch_args(tiles, queries, heads, self.mask_range(), bounds)
    }

    /// Returns the arguments of a kernel with resident keys.
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
        let row = problem.heads.heads * problem.value_width;
        let out = HeadStrides {
            offset: 0,
            batch: problem.queries * row,
            row,
            head: problem.value_width,
        };
        let in_vectors = |strides| in_vectors(strides, self.plan.vector);
        let [q, k, v] = self.head_strides.map(in_vectors);
        let [tile_rows, units] = tiles.sizes();
        let MaskRange {
            shift,
            before,
            after,
            columns,
        } = range;
        LaunchArgs {
            client: self.projections[0].client.clone(),
            cubes: rows.div_ceil(tile_rows) * heads * problem.batch,
            units: units as u32,
            tiles,
            vector: self.plan.vector,
            projections: [0, 1, 2].map(|part| buffer(&self.projections[part.min(last)])),
            bounds: bounds.argument(),
            strides: AttentionStridesLaunch::new(q, k, v, in_vectors(out)),
            sizes: AttentionSizesLaunch::new(
                DeviceMaskRangeLaunch::new(shift, before, after, columns, rows as i32),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                (problem.heads.heads / problem.heads.groups) as u32,
            ),
            dtype: dtype_to_storage_type(problem.dtype),
        }
    }

    /// Returns the sum of `out * dout` over each row, `[batch, heads, queries]`.
    fn delta(&self, out: CubeTensor, dout: &CubeTensor) -> CubeTensor {
        const UNITS: u32 = 256;
        let problem = self.problem;
        let delta = empty(&out, problem.lse_shape(), wide(problem.dtype));
        let rows = problem.batch * problem.queries * problem.heads.heads;
        let (client, vector) = (out.client.clone(), self.plan.vector);
        unsafe {
            launch!(
                attention_delta,
                [client, rows.div_ceil(UNITS as usize / LANES), UNITS],
                [vector],
                [out, dout, &delta],
                (
                    rows as u32,
                    problem.queries as u32,
                    problem.heads.heads as u32
                ),
                (
                    problem.value_width / vector,
                    UNITS,
                    dtype_to_storage_type(problem.dtype)
                )
            );
        }
        delta
    }

    fn sink(&self, sink: CubeTensor, lse: CubeTensor, delta: CubeTensor) -> CubeTensor {
        let problem = self.problem;
        let heads = problem.heads.heads;
        let dsink = empty(&sink, [heads], wide(problem.dtype));
        let client = sink.client.clone();
        let plan = RowPlan::new(&client, problem.dtype, problem.heads.width);
        let units = client.properties().hardware.plane_size_max.max(256);
        unsafe {
            launch!(
                attention_sink,
                [client, heads, units],
                [],
                [sink, lse, delta, &dsink],
                (problem.batch as u32, heads as u32, problem.queries as u32),
                (units, plan.planes())
            );
        }
        dsink
    }
}

fn buffer(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

/// Returns the tensor itself if the rows of a head are contiguous, otherwise a copy.
fn readable(tensor: CubeTensor) -> CubeTensor {
    match tensor.meta.strides().last() {
        Some(1) => tensor,
        _ => into_contiguous(tensor),
    }
}
