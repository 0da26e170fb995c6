//! Attention on the CPU. There is one task per sequence and head, which stores the scores of a few queries at a time.

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use pulp::{Arch, Simd, WithSimd};

mod backward;
mod forward;
mod load;
mod product;

use backward::{HeadGradients, SavedForward};
use forward::{HeadInputs, HeadOutput};
use load::HeadRows;
use product::LANES;

use super::mask::MaskRange;
use super::ops::HeadStrides;
use super::problem::AttentionProblem;
use crate::cpu::{Element, Real, for_float, for_rows, map_tasks, slice, tensor, unfused};
use crate::flat::cpu::accumulate;
use crate::gradient::Place;

/// Computes the forward pass. See [`Pass::Forward`](super::ops::Pass::Forward) for inputs and outputs.
pub(super) fn forward(problem: &AttentionProblem, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
    for_float!(problem.dtype, E => forward_in::<E>(problem, inputs))
}

/// Computes the backward pass. See [`Pass::Backward`](super::ops::Pass::Backward) for inputs and outputs.
pub(super) fn backward(
    problem: &AttentionProblem,
    inputs: Vec<FlexTensor>,
    places: Option<[Place; 2]>,
) -> Vec<FlexTensor> {
    for_float!(problem.dtype, E => backward_in::<E>(problem, inputs, places))
}

fn forward_in<E: Element>(
    problem: &AttentionProblem,
    mut inputs: Vec<FlexTensor>,
) -> Vec<FlexTensor> {
    let rest = inputs.split_off(problem.projections());
    let heads = HeadTensors::<E>::new(problem, inputs, rest.first());
    let outputs = tasks(problem, 2, |task| {
        Arch::new().dispatch(ForwardTask(heads.head(task)))
    });
    let rows: Vec<_> = outputs.iter().map(|output| output.out.as_slice()).collect();
    let shape = problem.out_shape();
    let rows = TaskRows {
        tasks: &rows,
        share: 1,
        width: problem.value_width,
    };
    let out = gather::<E>(problem, problem.queries, &[rows]);
    let mut statistics: Vec<&[E::Wide]> = outputs.iter().map(|output| &output.lse[..]).collect();
    if problem.with_max {
        statistics.extend(outputs.iter().map(|output| &output.largest[..]));
    }
    let statistics = tensor(statistics.concat(), problem.statistics_shape());
    vec![tensor(out, shape), statistics]
}

fn backward_in<E: Element>(
    problem: &AttentionProblem,
    mut inputs: Vec<FlexTensor>,
    places: Option<[Place; 2]>,
) -> Vec<FlexTensor> {
    let mut rest = inputs.split_off(problem.projections());
    let flat = places.and_then(|_| rest.pop());
    let heads = HeadTensors::<E>::new(problem, inputs, rest.get(3));
    let [out, lse, dout] = [0, 1, 2].map(|i| rest[i].to_contiguous());
    let (out, dout, lse) = (slice::<E>(&out), slice::<E>(&dout), slice::<E::Wide>(&lse));
    let (count, width, queries) = (problem.heads.heads, problem.value_width, problem.queries);
    let gradients = tasks(problem, 5, |task| {
        let first = (task / count * queries * count + task % count) * width;
        let [out, dout] = [out, dout].map(|values| HeadRows {
            values: &values[first..],
            stride: count * width,
            count: queries,
            width,
        });
        let given = SavedForward {
            out,
            dout,
            lse: &lse[task * queries..][..queries],
        };
        Arch::new().dispatch(BackwardTask(heads.head(task), given))
    });
    let share = count / problem.heads.groups;
    let (key_width, value_width) = (problem.heads.width, problem.value_width);
    let q: Vec<_> = gradients.iter().map(|head| head.q.as_slice()).collect();
    let k: Vec<_> = gradients.iter().map(|head| head.k.as_slice()).collect();
    let v: Vec<_> = gradients.iter().map(|head| head.v.as_slice()).collect();
    let rows = |tasks, share, width| TaskRows {
        tasks,
        share,
        width,
    };
    let dq = rows(&q, 1, key_width);
    let of_keys = [rows(&k, share, key_width), rows(&v, share, value_width)];
    let mut outputs = Vec::new();
    if problem.packed {
        let [dk, dv] = of_keys;
        let dqkv = gather::<E>(problem, queries, &[dq, dk, dv]);
        let shape = [problem.batch, queries, problem.heads.features()];
        outputs.push(tensor(dqkv, shape));
    } else {
        outputs.push(tensor(
            gather::<E>(problem, queries, &[dq]),
            problem.q_shape(),
        ));
        outputs.push(match flat.zip(places) {
            Some((flat, places)) => places
                .iter()
                .zip(of_keys)
                .fold(flat, |flat, (place, rows)| {
                    let sums = gather::<E::Wide>(problem, problem.keys, &[rows]);
                    let length = sums.len();
                    accumulate(flat, place.offset, &tensor(sums, [length]), place.add)
                }),
            None => {
                let [mut pair, dv] =
                    of_keys.map(|rows| gather::<E>(problem, problem.keys, &[rows]));
                pair.extend(dv);
                tensor(pair, [problem.key_elements()])
            }
        });
    }
    if problem.sink {
        let sum = |head: usize| {
            let heads = gradients.iter().skip(head).step_by(count);
            heads.fold(E::Wide::ZERO, |sum, head| sum + head.sink)
        };
        let dsink: Vec<_> = (0..count).map(sum).collect();
        outputs.push(tensor(dsink, [count]));
    }
    outputs
}

/// The forward pass of one head. It is a struct because a closure of this size would not be inlined into SIMD code.
struct ForwardTask<'a, E: Element>(HeadInputs<'a, E>);

impl<E: Element> WithSimd for ForwardTask<'_, E> {
    type Output = HeadOutput<E::Wide>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Self::Output {
        if unfused::<S>() {
            forward::forward::<E, false>(self.0)
        } else {
            forward::forward::<E, true>(self.0)
        }
    }
}

/// The backward pass of one head.
struct BackwardTask<'a, E: Element>(HeadInputs<'a, E>, SavedForward<'a, E>);

impl<E: Element> WithSimd for BackwardTask<'_, E> {
    type Output = HeadGradients<E::Wide>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Self::Output {
        if unfused::<S>() {
            backward::backward::<E, false>(self.0, self.1)
        } else {
            backward::backward::<E, true>(self.0, self.1)
        }
    }
}

/// The queries, keys and values of all heads.
struct HeadTensors<'a, E: Element> {
    problem: &'a AttentionProblem,
    tensors: Vec<FlexTensor>,
    head_strides: [HeadStrides; 3],
    sink: Option<Vec<E::Wide>>,
    visible: Vec<Range<usize>>,
}

impl<'a, E: Element> HeadTensors<'a, E> {
    fn new(
        problem: &'a AttentionProblem,
        tensors: Vec<FlexTensor>,
        sink: Option<&FlexTensor>,
    ) -> Self {
        let tensors: Vec<_> = tensors.into_iter().map(readable).collect();
        let layouts: Vec<_> = tensors
            .iter()
            .map(|tensor| {
                let layout = tensor.layout();
                let strides = layout.strides().iter().map(|stride| *stride as usize);
                (layout.start_offset(), strides.collect())
            })
            .collect();
        let band = MaskRange::new(problem.queries, problem.keys, &problem.options);
        let sink = sink.filter(|_| problem.sink);
        Self {
            problem,
            head_strides: problem.head_strides(&layouts),
            sink: sink.map(|sink| slice::<E::Wide>(&sink.to_contiguous()).to_vec()),
            visible: band.all(problem.queries, problem.options.ranges.as_ref()),
            tensors,
        }
    }

    /// Returns the head of a task. Tasks are ordered by sequence, then by head.
    fn head(&self, task: usize) -> HeadInputs<'_, E> {
        let heads = self.problem.heads;
        let (batch, head) = (task / heads.heads, task % heads.heads);
        let group = head / (heads.heads / heads.groups);
        let source = |part: usize, head: usize, count: usize, width: usize| {
            let place = self.head_strides[part];
            let tensor = &self.tensors[part.min(self.tensors.len() - 1)];
            let first = place.offset + batch * place.batch + head * place.head;
            HeadRows {
                values: &tensor.storage::<E>()[first..],
                stride: place.row,
                count,
                width,
            }
        };
        HeadInputs {
            q: source(0, head, self.problem.queries, heads.width),
            k: source(1, group, self.problem.keys, heads.width),
            v: source(2, group, self.problem.keys, self.problem.value_width),
            scale: E::Wide::of(self.problem.scale),
            sink: self.sink.as_ref().map(|sink| sink[head]),
            visible: &self.visible,
        }
    }
}

/// Returns the tensor itself if each row of a head is contiguous, otherwise a contiguous copy.
fn readable(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let last = layout.strides().last();
    if layout.has_positive_strides() && last == Some(&1) {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

/// The minimum number of multiplications for which a parallel task is worth its overhead.
const MIN_TASK_PRODUCTS: usize = 256 * 1024;

/// Computes one result per sequence and head, in this order. `products` is the number of matrix multiplications per
/// head.
fn tasks<T: Send>(
    problem: &AttentionProblem,
    products: usize,
    work: impl Fn(usize) -> T + Sync + Send,
) -> Vec<T> {
    let count = problem.batch * problem.heads.heads;
    let cost = products * problem.queries * problem.keys * problem.heads.width;
    let least = (MIN_TASK_PRODUCTS / cost.max(1)).max(1);
    let several = |first| {
        let heads = first..count.min(first + least);
        heads.map(&work).collect::<Vec<_>>()
    };
    let results = map_tasks((0..count).step_by(least), several);
    results.into_iter().flatten().collect()
}

/// The padded rows of each task, with `width` features per row, and the number of consecutive tasks whose results are
/// summed.
#[derive(Clone, Copy)]
struct TaskRows<'a, T> {
    tasks: &'a [&'a [T]],
    share: usize,
    width: usize,
}

/// Gathers the rows of all tasks into `[batch, rows, features]`. In the features, parts are adjacent, and heads are
/// adjacent within a part.
fn gather<E: Element>(
    problem: &AttentionProblem,
    rows: usize,
    parts: &[TaskRows<'_, E::Wide>],
) -> Vec<E> {
    let count = problem.heads.heads;
    let of_part = |part: &TaskRows<'_, _>| count / part.share * part.width;
    let features: usize = parts.iter().map(of_part).sum();
    let mut out = vec![E::narrow(E::Wide::ZERO); problem.batch * rows * features];
    for_rows(
        &mut out,
        features,
        #[inline(always)]
        |line, out| {
            let (batch, row) = (line / rows, line % rows);
            fill_row::<E>(out, row, parts, batch * count..(batch + 1) * count);
        },
    );
    out
}

#[inline(always)]
fn fill_row<E: Element>(
    out: &mut [E],
    row: usize,
    parts: &[TaskRows<'_, E::Wide>],
    heads: Range<usize>,
) {
    let mut out = out;
    for part in parts {
        let width = part.width;
        let first = row * width.next_multiple_of(LANES);
        let (own, rest) = out.split_at_mut(heads.len() / part.share * width);
        out = rest;
        let groups = part.tasks[heads.clone()].chunks(part.share);
        for (out, group) in own.chunks_exact_mut(width).zip(groups) {
            let line = |task: &'_ &[E::Wide]| -> Range<usize> {
                debug_assert!(first + width <= task.len());
                first..first + width
            };
            if let [only] = group {
                for (out, value) in out.iter_mut().zip(&only[line(only)]) {
                    *out = E::narrow(*value);
                }
                continue;
            }
            for (column, out) in out.iter_mut().enumerate() {
                let sum = group
                    .iter()
                    .fold(E::Wide::ZERO, |sum, task| sum + task[first + column]);
                *out = E::narrow(sum);
            }
        }
    }
}
