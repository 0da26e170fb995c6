//! The trait of attention engines, and the portable one.

use std::fmt::Debug;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::ops::{AttentionBackwardOp, AttentionForwardOp, Kernels};
use super::problem::{AttentionGradients, AttentionProblem, ProjectionGradients, Projections};
use crate::cpu::wide;
use crate::flat::accumulate;
use crate::gradient::FlatGradients;
use crate::launch::launch;

/// Computes attention, forward and backward, on plain tensors (no autodiff).
///
/// [`Portable`] supports every problem on every device. An engine for one kind of device reports in
/// [`supports`](Self::supports) what it does not support; that is an error, never a silent
/// fallback. Memory beside inputs and outputs must be linear in the sequence length.
pub trait AttentionEngine: Debug + Send + Sync {
    /// The name used in errors.
    fn name(&self) -> &'static str;

    /// Checks whether the engine supports this problem.
    ///
    /// # Errors
    ///
    /// The unsupported property, and what would be supported.
    fn supports(&self, problem: &AttentionProblem) -> Result<(), String>;

    /// The output `[batch, queries, heads, value width]` and the log-sum-exp `[batch, heads, queries]`
    /// of the scores that each query sees, its sink included (f64 for f64, otherwise f32). A query
    /// that sees nothing gets 0 and minus infinity. `sink` is of the type of the log-sum-exp.
    ///
    /// `with_max`: also the largest score of each query, scaled and masked, without the sink, in the shape and the type of
    /// the log-sum-exp. For a query that sees nothing it is minus infinity, or at most -1e30.
    fn forward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
        with_max: bool,
    ) -> (Tensor<4>, Tensor<3>, Option<Tensor<3>>);

    /// The gradients of the projections, in the form that these came in, and of the sink.
    ///
    /// `out` and `lse` may cover more keys than these: probabilities are `exp(score - lse)`. With
    /// `sums`, and separate projections, the gradients of keys and values are written or added there
    /// as they were summed; these were checked.
    fn backward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
        result: (Tensor<4>, Tensor<3>),
        dout: Tensor<4>,
        sums: Option<FlatGradients>,
    ) -> AttentionGradients;
}

/// The kernels of this crate: tiles in SIMD code on the CPU and in shared memory on CubeCL devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Portable;

impl AttentionEngine for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn supports(&self, _problem: &AttentionProblem) -> Result<(), String> {
        Ok(())
    }

    fn forward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
        with_max: bool,
    ) -> (Tensor<4>, Tensor<3>, Option<Tensor<3>>) {
        forward_by(Kernels::Portable, problem, projections, sink, with_max)
    }

    fn backward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
        result: (Tensor<4>, Tensor<3>),
        dout: Tensor<4>,
        sums: Option<FlatGradients>,
    ) -> AttentionGradients {
        backward_by(
            Kernels::Portable,
            problem,
            projections,
            sink,
            result,
            dout,
            sums,
        )
    }
}

/// [`AttentionEngine::forward`] by these kernels; none where no query sees a key.
pub(super) fn forward_by(
    kernels: Kernels,
    problem: &AttentionProblem,
    projections: Projections,
    sink: Option<Tensor<1>>,
    with_max: bool,
) -> (Tensor<4>, Tensor<3>, Option<Tensor<3>>) {
    if problem.is_empty() {
        let (out, lse) = empty_result(problem, &projections, sink);
        let unseen = with_max.then(|| lse.full_like(f64::NEG_INFINITY));
        return (out, lse, unseen);
    }
    let mut inputs = projections.into_tensors();
    inputs.extend(sink.map(Tensor::into_dispatch));
    let ranges = problem.options.ranges.as_ref();
    inputs.extend(ranges.map(|ranges| ranges.of_queries().clone().into_dispatch()));
    let op = AttentionForwardOp {
        problem: problem.clone(),
        kernels,
        with_max,
    };
    let mut outputs = launch(op, inputs).into_iter();
    let out = next_tensor(&mut outputs);
    if !with_max {
        return (out, next_tensor(&mut outputs), None);
    }
    let statistics: Tensor<4> = next_tensor(&mut outputs);
    let part = |at| statistics.clone().narrow(0, at, 1).squeeze_dim::<3>(0);
    (out, part(0), Some(part(1)))
}

/// [`AttentionEngine::backward`] by these kernels; none where no query sees a key.
pub(super) fn backward_by(
    kernels: Kernels,
    problem: &AttentionProblem,
    projections: Projections,
    sink: Option<Tensor<1>>,
    (out, lse): (Tensor<4>, Tensor<3>),
    dout: Tensor<4>,
    sums: Option<FlatGradients>,
) -> AttentionGradients {
    if problem.is_empty() {
        return AttentionGradients {
            projections: projections.zero_gradients(sums),
            dsink: sink.map(|sink| sink_gradient(sink, out, lse, dout)),
        };
    }
    let mut inputs = projections.into_tensors();
    inputs.extend([
        out.into_dispatch(),
        lse.into_dispatch(),
        dout.into_dispatch(),
    ]);
    inputs.extend(sink.map(Tensor::into_dispatch));
    if let Some(ranges) = &problem.options.ranges {
        let both = [ranges.of_queries(), ranges.of_keys()];
        inputs.extend(both.map(|bounds| bounds.clone().into_dispatch()));
    }
    let places = sums.map(|sums| {
        inputs.push(sums.flat.into_dispatch());
        [sums.places[0], sums.places[1]]
    });
    let kernel = AttentionBackwardOp {
        problem: problem.clone(),
        kernels,
        places,
    };
    let mut outputs = launch(kernel, inputs).into_iter();
    let projections = if problem.packed {
        ProjectionGradients::Packed(next_tensor(&mut outputs))
    } else {
        let (dq, flat) = (next_tensor(&mut outputs), next_tensor::<1>(&mut outputs));
        match places {
            Some(_) => ProjectionGradients::Flat { dq, flat },
            None => {
                let (k, v) = (problem.k_shape(), problem.v_shape());
                let part = |shape: [usize; 4], offset| {
                    let count = shape.iter().product();
                    flat.clone().narrow(0, offset, count).reshape(shape)
                };
                ProjectionGradients::Separate {
                    dq,
                    dk: part(k, 0),
                    dv: part(v, k.iter().product()),
                }
            }
        }
    };
    AttentionGradients {
        projections,
        dsink: problem.sink.then(|| next_tensor(&mut outputs)),
    }
}

fn next_tensor<const D: usize>(tensors: &mut impl Iterator<Item = DispatchTensor>) -> Tensor<D> {
    match tensors.next() {
        Some(tensor) => Tensor::from_dispatch(tensor),
        None => unreachable!("a kernel gives as many outputs as it has promised"),
    }
}

/// The result where no query sees a key.
fn empty_result(
    problem: &AttentionProblem,
    projections: &Projections,
    sink: Option<Tensor<1>>,
) -> (Tensor<4>, Tensor<3>) {
    let device = projections.device();
    let out = Tensor::zeros(problem.out_shape(), (&device, problem.dtype));
    let lse = match sink {
        Some(sink) => sink
            .reshape([1, problem.heads.heads, 1])
            .expand(problem.lse_shape()),
        None => Tensor::full(
            problem.lse_shape(),
            f64::NEG_INFINITY,
            (&device, wide(problem.dtype)),
        ),
    };
    (out, lse)
}

/// The gradient of the sink of a result that covers other keys than those of a problem without any.
fn sink_gradient(sink: Tensor<1>, out: Tensor<4>, lse: Tensor<3>, dout: Tensor<4>) -> Tensor<1> {
    let heads = sink.dims()[0];
    if lse.shape().num_elements() == 0 {
        return sink.zeros_like();
    }
    let wide = sink.dtype();
    let delta = (out.cast(wide) * dout.cast(wide)).sum_dim(3);
    let delta = delta.squeeze_dim::<3>(3).swap_dims(1, 2);
    let shares = (sink.reshape([1, heads, 1]) - lse).exp();
    -(shares * delta).sum_dim(2).sum_dim(0).reshape([heads])
}

impl Projections {
    fn into_tensors(self) -> Vec<DispatchTensor> {
        match self {
            Self::Separate { q, k, v } => [q, k, v].map(Tensor::into_dispatch).to_vec(),
            Self::Packed(qkv) => vec![qkv.into_dispatch()],
        }
    }

    pub(super) fn device(&self) -> burn::tensor::Device {
        match self {
            Self::Separate { q, .. } => q.device(),
            Self::Packed(qkv) => qkv.device(),
        }
    }

    fn zero_gradients(&self, sums: Option<FlatGradients>) -> ProjectionGradients {
        match (self, sums) {
            (Self::Packed(qkv), _) => ProjectionGradients::Packed(qkv.zeros_like()),
            (Self::Separate { q, k, v }, None) => ProjectionGradients::Separate {
                dq: q.zeros_like(),
                dk: k.zeros_like(),
                dv: v.zeros_like(),
            },
            (Self::Separate { q, k, v }, Some(sums)) => {
                let written = sums
                    .places
                    .iter()
                    .zip([k, v])
                    .filter(|(place, _)| !place.add);
                let flat = written.fold(sums.flat, |flat, (place, of)| {
                    accumulate(flat, place.offset, of.zeros_like().flatten(0, 3), false)
                });
                ProjectionGradients::Flat {
                    dq: q.zeros_like(),
                    flat,
                }
            }
        }
    }
}
