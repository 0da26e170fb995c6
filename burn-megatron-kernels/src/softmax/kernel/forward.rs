//! The kernel that computes probabilities from scores.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::*;
use crate::cube::instance::{AotList, given, instance, types as elements};
use crate::cube::{cube_max, cube_sum, empty, lane_max, lane_sum, launch};

/// The maximum number of f32 values that a unit keeps. In a cube of 1024 units, a unit has 64 registers.
const REGISTER_VALUES: usize = 32;

#[cube(launch_unchecked)]
fn softmax_kernel<F: Float, M: Int, N: Size>(
    scores: &Tensor<Vector<F, N>>,
    sink: &ComptimeOption<OwnedTensor<f32>>,
    lengths: &ComptimeOption<OwnedTensor<i32>>,
    hidden: &ComptimeOption<OwnedTensor<Vector<M, N>>>,
    output: &mut Tensor<Vector<F, N>>,
    share: &mut ComptimeOption<OwnedTensor<f32>>,
    layout: &SoftmaxLayout,
    hidden_batches: usize,
    hidden_heads: usize,
    scale: f32,
    columns: usize,
    #[comptime] span: KeyRangeKind,
    #[comptime] off_by_one: bool,
    #[comptime] register_vectors: usize,
    #[comptime] units: u32,
    #[comptime] planes: bool,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let row = CUBE_POS;
    if row < layout.rows {
        let visible = visible::<N>(layout, lengths, row, span);
        let base = row * columns;
        let head = row / layout.queries % layout.heads;
        let batch = row / (layout.queries * layout.heads);
        let hidden_row = batch % hidden_batches * hidden_heads + head % hidden_heads;
        let place = RowPlace {
            scores: base,
            hidden: (hidden_row * layout.queries + row % layout.queries) * columns,
            scale,
        };

        let mut logit = f32::new(LOWEST);
        if comptime!(off_by_one) {
            logit = 0.0f32;
        }
        #[comptime]
        match sink {
            ComptimeOption::Some(sink) => logit = sink.as_slice()[head],
            ComptimeOption::None => {}
        }
        let has_sink = comptime!(off_by_one || sink.is_some());

        let mut largest = f32::new(LOWEST);
        let mut sum = 0.0f32;
        let unit = UNIT_POS as usize;
        let mut values = Array::<Vector<f32, N>>::new(comptime!(register_vectors.max(1)));
        if comptime!(register_vectors > 0) {
            let mut most = Vector::<f32, N>::new(f32::new(LOWEST));
            #[unroll]
            for i in 0..register_vectors {
                let column = unit + i * units as usize;
                let mut value = Vector::<f32, N>::new(f32::new(LOWEST));
                if column >= visible.first && column < visible.last {
                    value = scaled(scores, hidden, &place, column, &visible, span);
                }
                values[i] = value;
                most = max(most, value);
            }
            largest = max(cube_max(lane_max(most), units, planes), logit);
            let mut weights = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for i in 0..register_vectors {
                let weight = exp_weight(values[i], largest);
                values[i] = weight;
                weights += weight;
            }
            sum = cube_sum(lane_sum(weights), units, planes);
        } else {
            let mut column = visible.first + unit;
            while column < visible.last {
                let value = scaled(scores, hidden, &place, column, &visible, span);
                let next = max(largest, lane_max(value));
                sum = sum * (largest - next).exp() + lane_sum(exp_weight(value, next));
                largest = next;
                column += units as usize;
            }
            let own = largest;
            largest = max(cube_max(own, units, planes), logit);
            sum = cube_sum(sum * (own - largest).exp(), units, planes);
        }

        let mut rest = 0.0f32;
        if comptime!(has_sink) {
            rest = (logit - largest).exp();
        }
        let total = sum + rest;
        let inverse = select(total == 0.0f32, 0.0f32, 1.0f32 / total);
        let inverses = Vector::<f32, N>::new(inverse);
        if comptime!(register_vectors > 0) {
            #[unroll]
            for i in 0..register_vectors {
                let column = unit + i * units as usize;
                if column < columns {
                    output[base + column] = Vector::cast_from(values[i] * inverses);
                }
            }
        } else {
            let mut column = unit;
            while column < columns {
                let mut value = Vector::<f32, N>::new(0.0f32);
                if column >= visible.first && column < visible.last {
                    let again = scaled(scores, hidden, &place, column, &visible, span);
                    value = exp_weight(again, largest) * inverses;
                }
                output[base + column] = Vector::cast_from(value);
                column += units as usize;
            }
        }
        #[comptime]
        match share {
            ComptimeOption::Some(share) => {
                if UNIT_POS == 0 {
                    share.as_mut_slice()[row] = rest * inverse;
                }
            }
            ComptimeOption::None => {}
        }
    }
}

/// The position of a row in the scores and in the mask tensor, in vectors, and the scale of the scores.
#[derive(CubeType, Clone, Copy)]
struct RowPlace {
    scores: usize,
    hidden: usize,
    scale: f32,
}

/// Returns the scaled scores of a vector of keys. Masked keys get the lowest finite value.
#[cube]
fn scaled<F: Float, M: Int, N: Size>(
    scores: &Tensor<Vector<F, N>>,
    hidden: &ComptimeOption<OwnedTensor<Vector<M, N>>>,
    place: &RowPlace,
    column: usize,
    visible: &VisibleVectors,
    #[comptime] span: KeyRangeKind,
) -> Vector<f32, N> {
    let mut value =
        Vector::<f32, N>::cast_from(scores[place.scores + column]) * Vector::new(place.scale);
    if comptime!(span != KeyRangeKind::All) {
        let start = column * N::value();
        // Only vectors at the ends of the visible range have both masked and visible lanes.
        if start < visible.low || start + N::value() > visible.high {
            #[unroll]
            for lane in 0..N::value() {
                let key = start + lane;
                let sees = key >= visible.low && key < visible.high;
                let kept = select(sees, value.extract(lane), f32::new(LOWEST));
                value.insert(lane, kept);
            }
        }
    }
    #[comptime]
    match hidden {
        ComptimeOption::Some(hidden) => {
            let bool_bytes = hidden.as_slice()[place.hidden + column];
            #[unroll]
            for lane in 0..N::value() {
                let hides = bool_bytes.extract(lane) != M::from_int(0);
                let kept = select(hides, f32::new(LOWEST), value.extract(lane));
                value.insert(lane, kept);
            }
        }
        ComptimeOption::None => {}
    }
    value
}

/// Returns `e^(value - largest)`, or 0 for masked keys.
#[cube]
fn exp_weight<N: Size>(value: Vector<f32, N>, largest: f32) -> Vector<f32, N> {
    let hidden = value.less_equal(&Vector::new(f32::new(LOWEST)));
    let weight = (value - Vector::new(largest)).exp();
    select_many(hidden, Vector::new(0.0f32), weight)
}

pub(in super::super) fn forward(
    plan: &SoftmaxProblem,
    mut inputs: Vec<CubeTensor>,
) -> Vec<CubeTensor> {
    let [batch, heads, queries, keys] = plan.shape;
    let scores = inputs.remove(0);
    let sink = (plan.sink == SinkKind::Learned).then(|| inputs.remove(0));
    let lengths = (plan.span == KeyRange::Lengths).then(|| inputs.remove(0));
    let hidden = plan.hidden.map(|_| inputs.remove(0));
    let [hidden_batches, hidden_heads] = plan.hidden.unwrap_or([1, 1]);

    let client = scores.client.clone();
    let launch = RowPlan::new(&client, scores.dtype, keys);
    let output = empty(&scores, scores.shape(), scores.dtype);
    let share = sink
        .as_ref()
        .map(|sink| empty(sink, [batch, heads, queries], sink.dtype));
    let types = types(&scores, hidden.as_ref());
    let held = register_vectors(&launch, REGISTER_VALUES / launch.vector);
    unsafe {
        launch!(
            softmax_kernel,
            [client, plan.rows(), launch.units],
            [launch.vector],
            [scores, sink, lengths, hidden],
            [&output, share.clone()],
            (SoftmaxLayout::launch(plan), hidden_batches, hidden_heads),
            (plan.scale as f32, launch.columns),
            (plan.span.into(), plan.sink == SinkKind::Zero, held),
            (launch.units, launch.planes(), types)
        );
    }
    [Some(output), share].into_iter().flatten().collect()
}

/// Adds AOT instances with rows of 4096 keys that stay in registers or are read twice.
pub(super) fn aot_instances(list: &mut AotList) {
    for (name, element, vector) in elements() {
        for register_vectors in [0, 4] {
            let units = 4096 / (vector * 4) as u32;
            instance!(
                list.streaming("masked_softmax/forward/{name}/4096/held{register_vectors}"), units,
                softmax_kernel::SoftmaxKernel
                [_ (given(true)) (given(false)) (given(false)) _ (given(true)) _ _ _ _ _]
                (vector, KeyRangeKind::Window, false, register_vectors, units, true, [element,
                ElemType::UInt(UIntKind::U8)])
            );
        }
    }
}
