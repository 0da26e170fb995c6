//! The kernels for the gradients of the scores and of the sink.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::*;
use crate::cube::instance::{AotList, given, instance, types as elements};
use crate::cube::{cube_sum, empty, lane_sum, launch};

/// The maximum number of elements that a unit keeps of the output, and of the gradient of the output.
const REGISTER_VALUES: usize = 16;
/// The number of elements per unit above which a larger cube is used. With more elements per unit, the registers limit
/// the number of concurrent cubes.
const PREFERRED_VALUES: usize = 8;

#[cube(launch_unchecked)]
fn gradient_kernel<F: Float, N: Size>(
    output: &Tensor<Vector<F, N>>,
    gradient: &Tensor<Vector<F, N>>,
    share: &ComptimeOption<OwnedTensor<f32>>,
    lengths: &ComptimeOption<OwnedTensor<i32>>,
    scores: &mut Tensor<Vector<F, N>>,
    sink: &mut ComptimeOption<OwnedTensor<f32>>,
    layout: &SoftmaxLayout,
    scale: f32,
    columns: usize,
    #[comptime] span: KeyRangeKind,
    #[comptime] register_vectors: usize,
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[define(F)] _type: ElemType,
) {
    let row = CUBE_POS;
    if row < layout.rows {
        let visible = visible::<N>(layout, lengths, row, span);
        let base = row * columns;
        let unit = UNIT_POS as usize;
        let mut partial = Vector::<f32, N>::new(0.0f32);
        let size = comptime!(register_vectors.max(1));
        let mut outputs = Array::<Vector<F, N>>::new(size);
        let mut gradients = Array::<Vector<F, N>>::new(size);
        if comptime!(register_vectors > 0) {
            #[unroll]
            for i in 0..register_vectors {
                let column = unit + i * units as usize;
                outputs[i] = Vector::new(F::from_int(0));
                gradients[i] = Vector::new(F::from_int(0));
                if column >= visible.first && column < visible.last {
                    outputs[i] = output[base + column];
                    gradients[i] = gradient[base + column];
                }
                partial += product(outputs[i], gradients[i]);
            }
        } else {
            let mut column = visible.first + unit;
            while column < visible.last {
                partial += product(output[base + column], gradient[base + column]);
                column += units as usize;
            }
        }
        let total = cube_sum(lane_sum(partial), units, planes);
        // The value is written before the loop, so that the loop keeps one value less in registers.
        #[comptime]
        match (share, sink) {
            (ComptimeOption::Some(share), ComptimeOption::Some(sink)) => {
                if UNIT_POS == 0 {
                    sink.as_mut_slice()[row] = -share.as_slice()[row] * total;
                }
            }
            _ => {}
        }
        if comptime!(register_vectors > 0) {
            #[unroll]
            for i in 0..register_vectors {
                let column = unit + i * units as usize;
                if column < columns {
                    let value = of_scores(outputs[i], gradients[i], total, scale);
                    scores[base + column] = Vector::cast_from(value);
                }
            }
        } else {
            let mut column = unit;
            while column < columns {
                let mut value = Vector::<f32, N>::new(0.0f32);
                if column >= visible.first && column < visible.last {
                    let at = base + column;
                    value = of_scores(output[at], gradient[at], total, scale);
                }
                scores[base + column] = Vector::cast_from(value);
                column += units as usize;
            }
        }
    }
}

/// Returns `p g`. If `p` is 0, returns 0 for any `g`.
#[cube]
fn product<F: Float, N: Size>(p: Vector<F, N>, g: Vector<F, N>) -> Vector<f32, N> {
    let p = Vector::<f32, N>::cast_from(p);
    let zero = Vector::<f32, N>::new(0.0f32);
    select_many(p.equal(&zero), zero, p * Vector::cast_from(g))
}

/// Returns `scale p (g - total)`, or 0 if `p` is 0.
#[cube]
fn of_scores<F: Float, N: Size>(
    p: Vector<F, N>,
    g: Vector<F, N>,
    total: f32,
    scale: f32,
) -> Vector<f32, N> {
    let p = Vector::<f32, N>::cast_from(p);
    let zero = Vector::<f32, N>::new(0.0f32);
    let value = Vector::new(scale) * p * (Vector::cast_from(g) - Vector::new(total));
    select_many(p.equal(&zero), zero, value)
}

/// Sums the rows of each head, with one cube per head. The order of the sum depends only on the sizes.
#[cube(launch_unchecked)]
fn sink_kernel(
    rows: &Tensor<f32>,
    sink: &mut Tensor<f32>,
    layout: &SoftmaxLayout,
    #[comptime] units: u32,
    #[comptime] planes: bool,
) {
    let head = CUBE_POS;
    if head < layout.heads {
        let of_head = layout.rows / layout.heads;
        let mut sum = 0.0f32;
        let mut i = UNIT_POS as usize;
        while i < of_head {
            let batch = i / layout.queries;
            let at = (batch * layout.heads + head) * layout.queries + i % layout.queries;
            sum += rows[at];
            i += units as usize;
        }
        let total = cube_sum(sum, units, planes);
        if UNIT_POS == 0 {
            sink[head] = total;
        }
    }
}

pub(in super::super) fn backward(
    plan: &SoftmaxProblem,
    mut inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let [_, _, _, keys] = plan.shape;
    let (output, gradient) = (inputs.remove(0), inputs.remove(0));
    let share = (plan.sink == SinkKind::Learned).then(|| inputs.remove(0));
    let lengths = (plan.span == KeyRange::Lengths).then(|| inputs.remove(0));

    let client = output.client.clone();
    let launch = RowPlan::with_elements_per_unit(&client, output.dtype, keys, PREFERRED_VALUES);
    let scores = empty(&output, output.shape(), output.dtype);
    let rows = share
        .as_ref()
        .map(|share| empty(share, share.shape(), share.dtype));
    let dtype = dtype_to_storage_type(output.dtype);
    let held = register_vectors(&launch, REGISTER_VALUES / launch.vector);
    unsafe {
        launch!(
            gradient_kernel,
            [client, plan.rows(), launch.units],
            [launch.vector],
            [output, gradient, share, lengths],
            [&scores, rows.clone()],
            (
                SoftmaxLayout::launch(plan),
                plan.scale as f32,
                launch.columns
            ),
            (plan.span.into(), held, launch.units, launch.planes(), dtype)
        );
    }
    let sink = rows.map(|rows| sum_of_heads(plan, rows));
    [Some(scores), sink].into_iter().flatten().collect()
}

fn sum_of_heads(plan: &SoftmaxProblem, rows: CubeTensor) -> CubeTensor {
    let [_, heads, ..] = plan.shape;
    let client = rows.client.clone();
    let launch = RowPlan::new(&client, rows.dtype, plan.rows() / heads);
    let sink = empty(&rows, [heads], rows.dtype);
    unsafe {
        launch!(
            sink_kernel,
            [client, heads, launch.units],
            [],
            [rows, &sink],
            (SoftmaxLayout::launch(plan)),
            (launch.units, launch.planes())
        );
    }
    sink
}

/// Adds AOT instances with rows of 4096 keys that are read twice or stay in registers, and with the widest rows that
/// stay in registers. Also adds the kernel that sums over the rows of a head.
pub(super) fn aot_instances(list: &mut AotList) {
    for (name, element, vector) in elements() {
        for (held, units) in [
            (0, 4096 / PREFERRED_VALUES as u32),
            (PREFERRED_VALUES / vector, 4096 / PREFERRED_VALUES as u32),
            (REGISTER_VALUES / vector, 1024),
        ] {
            let keys = units as usize * (vector * held).max(PREFERRED_VALUES);
            instance!(
                list.streaming("masked_softmax/backward/{name}/{keys}/held{held}"), units,
                gradient_kernel::GradientKernel
                [_ _ (given(true)) (given(false)) _ (given(true)) _ _ _]
                (vector, KeyRangeKind::Window, held, units, true, element)
            );
        }
    }
    instance!(
        list.other("masked_softmax/sink/f32/1024"), 1024,
        sink_kernel::SinkKernel [_ _ _] (1024, true)
    );
}
