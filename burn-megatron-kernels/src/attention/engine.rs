//! The trait of attention engines, and the portable one.

use std::fmt::Debug;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::ops::{AttentionBackwardOp, AttentionForwardOp};
use super::problem::{AttentionProblem, Projections};
use crate::cpu::wide;
use crate::launch::{DeviceOp, launch};

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

    /// The output `[batch, queries, heads, width]` and the log-sum-exp `[batch, heads, queries]` of
    /// the scores that each query sees, its sink included (f64 for f64, otherwise f32). A query
    /// that sees nothing gets 0 and minus infinity. `sink` is of the type of the log-sum-exp.
    fn forward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
    ) -> (Tensor<4>, Tensor<3>);

    /// The gradients of the projections, in the form that these came in, and of the sink.
    ///
    /// `out` and `lse` may cover more keys than these: probabilities are `exp(score - lse)`.
    fn backward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
        result: (Tensor<4>, Tensor<3>),
        dout: Tensor<4>,
    ) -> (Projections, Option<Tensor<1>>);
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
    ) -> (Tensor<4>, Tensor<3>) {
        forward_by(
            AttentionForwardOp(problem.clone()),
            problem,
            projections,
            sink,
        )
    }

    fn backward(
        &self,
        problem: &AttentionProblem,
        projections: Projections,
        sink: Option<Tensor<1>>,
        result: (Tensor<4>, Tensor<3>),
        dout: Tensor<4>,
    ) -> (Projections, Option<Tensor<1>>) {
        let kernel = AttentionBackwardOp(problem.clone());
        backward_by(kernel, problem, projections, sink, result, dout)
    }
}

/// [`AttentionEngine::forward`] by a kernel with the inputs and outputs of [`AttentionForwardOp`].
pub(super) fn forward_by(
    kernel: impl DeviceOp,
    problem: &AttentionProblem,
    projections: Projections,
    sink: Option<Tensor<1>>,
) -> (Tensor<4>, Tensor<3>) {
    if problem.is_empty() {
        return empty_result(problem, &projections, sink);
    }
    let mut inputs = projections.into_tensors();
    inputs.extend(sink.map(Tensor::into_dispatch));
    inputs.extend(bounds(problem));
    let mut outputs = launch(kernel, inputs).into_iter();
    (next_tensor(&mut outputs), next_tensor(&mut outputs))
}

/// [`AttentionEngine::backward`] by a kernel with the inputs and outputs of [`AttentionBackwardOp`].
pub(super) fn backward_by(
    kernel: impl DeviceOp,
    problem: &AttentionProblem,
    projections: Projections,
    sink: Option<Tensor<1>>,
    (out, lse): (Tensor<4>, Tensor<3>),
    dout: Tensor<4>,
) -> (Projections, Option<Tensor<1>>) {
    if problem.is_empty() {
        // Without keys the output is 0 whatever the sink.
        return (projections.zeros_like(), sink.map(|sink| sink.zeros_like()));
    }
    let mut inputs = projections.into_tensors();
    inputs.extend([
        out.into_dispatch(),
        lse.into_dispatch(),
        dout.into_dispatch(),
    ]);
    inputs.extend(sink.map(Tensor::into_dispatch));
    inputs.extend(bounds(problem));
    let mut outputs = launch(kernel, inputs).into_iter();
    let gradients = if problem.packed {
        Projections::Packed(next_tensor(&mut outputs))
    } else {
        let (q, kv) = (next_tensor(&mut outputs), next_tensor::<5>(&mut outputs));
        let half = |index| kv.clone().narrow(0, index, 1).squeeze_dim(0);
        Projections::Separate {
            q,
            k: half(0),
            v: half(1),
        }
    };
    (gradients, problem.sink.then(|| next_tensor(&mut outputs)))
}

fn bounds(problem: &AttentionProblem) -> Option<DispatchTensor> {
    let documents = problem.options.documents.as_ref();
    documents.map(|documents| documents.bounds().clone().into_dispatch())
}

fn next_tensor<const D: usize>(tensors: &mut impl Iterator<Item = DispatchTensor>) -> Tensor<D> {
    match tensors.next() {
        Some(tensor) => Tensor::from_dispatch(tensor),
        None => unreachable!("a kernel gives as many outputs as it has promised"),
    }
}

/// The result for empty inputs: no query sees any key.
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

    fn zeros_like(&self) -> Self {
        match self {
            Self::Separate { q, k, v } => Self::Separate {
                q: q.zeros_like(),
                k: k.zeros_like(),
                v: v.zeros_like(),
            },
            Self::Packed(qkv) => Self::Packed(qkv.zeros_like()),
        }
    }
}
