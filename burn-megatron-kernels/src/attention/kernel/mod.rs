//! Attention on CubeCL devices: tiles in shared memory, sums in registers.
//!
//! The kernels multiply in f32 on the ordinary units. They read queries, keys and values where they
//! lie, whatever the strides between rows.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::{ComptimeOptionArgs, CubeDim};

mod backward;
mod forward;
pub(super) mod matrix;
mod plan;
mod specimens;
mod tile;

pub(crate) use specimens::specimens;

use backward::{attention_delta, attention_keys, attention_queries, attention_sink};
use forward::attention_forward;
use plan::Plan;
use tile::{LANES, ReachLaunch, Shape, SiteLaunch};

use super::portable::Place;
use super::problem::Problem;
use super::visible::Band;
use crate::cpu::wide;
use crate::cube::{Reduction, empty, grid};

/// Outputs as [`Forward`](super::portable::Forward) has them.
pub(super) fn forward(problem: &Problem, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let (call, mut rest) = Call::new(problem, inputs);
    let sink = problem.sink.then(|| rest.remove(0));
    let bounds = rest.pop();
    let like = &call.tensors[0];
    let out = empty(like, problem.out_shape(), problem.dtype);
    let lse = empty(like, problem.lse_shape(), wide(problem.dtype));
    let band = Band::new(problem.queries, problem.keys, &problem.options);
    let shape = call.plan.forward;
    let [q, k, v] = call.places;
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
            call.site(q),
            call.site(k),
            call.site(v),
            call.site(call.out),
            reach(band, problem.queries),
            problem.scale as f32,
            problem.batch as u32,
            problem.heads.heads as u32,
            call.share(),
            shape,
            dtype_to_storage_type(problem.dtype),
        );
    }
    vec![out, lse]
}

/// Outputs as [`Backward`](super::portable::Backward) has them.
pub(super) fn backward(problem: &Problem, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let (call, rest) = Call::new(problem, inputs);
    call.gradients(
        rest,
        |statistics, bounds, dq| call.queries(statistics, bounds, dq),
        |statistics, bounds, gradients| call.keys(statistics, bounds, gradients),
    )
}

/// One problem on one device.
#[derive(Debug)]
struct Call<'a> {
    problem: &'a Problem,
    tensors: Vec<CubeTensor>,
    places: [Place; 3],
    gradients: [Place; 3],
    out: Place,
    plan: Plan,
}

impl<'a> Call<'a> {
    /// The call, and the inputs behind the projections, contiguous.
    fn new(problem: &'a Problem, mut inputs: Vec<CubeTensor>) -> (Self, Vec<CubeTensor>) {
        let rest = inputs.split_off(if problem.packed { 1 } else { 3 });
        let tensors: Vec<_> = inputs.into_iter().map(readable).collect();
        let layouts: Vec<_> = tensors
            .iter()
            .map(|tensor| (0, tensor.meta.strides().iter().copied().collect()))
            .collect();
        let places = problem.places(&layouts);
        let row = problem.heads.heads * problem.heads.width;
        let out = Place {
            offset: 0,
            batch: problem.queries * row,
            row,
            head: problem.heads.width,
        };
        let gradients = problem.gradient_places();
        let all: Vec<_> = places.into_iter().chain(gradients).collect();
        let plan = Plan::new(&tensors[0].client, problem, &all);
        let call = Self {
            problem,
            tensors,
            places,
            gradients,
            out,
            plan,
        };
        (call, rest.into_iter().map(into_contiguous).collect())
    }

    /// What holds the queries (0), the keys (1) or the values (2).
    fn projection(&self, part: usize) -> CubeTensor {
        self.tensors[part.min(self.tensors.len() - 1)].clone()
    }

    /// The gradients of everything, from what stands behind the projections. `queries` and `keys`
    /// launch what fills the gradients of queries, and of keys and values: they get the gradient of
    /// the output, the log-sum-exp and delta, then the bounds of the documents.
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
        let mut outputs = match problem.packed {
            true => vec![empty(like, like.shape(), problem.dtype)],
            false => vec![
                empty(like, problem.out_shape(), problem.dtype),
                empty(like, problem.pair_shape(), problem.dtype),
            ],
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

    fn share(&self) -> u32 {
        (self.problem.heads.heads / self.problem.heads.groups) as u32
    }

    fn cubes(&self, rows: usize, heads: usize, shape: Shape) -> usize {
        rows.div_ceil(shape.rows) * heads * self.problem.batch
    }

    fn site(&self, place: Place) -> SiteLaunch {
        let vectors = |elements: usize| (elements / self.plan.vector) as u32;
        SiteLaunch::new(
            vectors(place.offset),
            vectors(place.batch),
            vectors(place.row),
            vectors(place.head),
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
        let band = Band::new(problem.queries, problem.keys, &problem.options);
        let cubes = self.cubes(problem.queries, problem.heads.heads, shape);
        let [q, k, v] = self.places;
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
                self.site(q),
                self.site(k),
                self.site(v),
                self.site(self.out),
                self.site(self.gradients[0]),
                reach(band, problem.queries),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                self.share(),
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
        let band = Band::new(problem.queries, problem.keys, &problem.options);
        let cubes = self.cubes(problem.keys, problem.heads.groups, shape);
        let [q, k, v] = self.places;
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
                self.site(q),
                self.site(k),
                self.site(v),
                self.site(self.out),
                self.site(self.gradients[1]),
                self.site(self.gradients[2]),
                reach(band.transposed(problem.queries), problem.keys),
                problem.scale as f32,
                problem.batch as u32,
                problem.heads.heads as u32,
                self.share(),
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

fn reach(band: Band, rows: usize) -> ReachLaunch {
    ReachLaunch::new(
        band.shift,
        band.before,
        band.after,
        band.columns,
        rows as i32,
    )
}

/// The tensor itself where rows of a head are neighbours in memory, otherwise a copy.
fn readable(tensor: CubeTensor) -> CubeTensor {
    match tensor.meta.strides().last() {
        Some(1) => tensor,
        _ => into_contiguous(tensor),
    }
}
