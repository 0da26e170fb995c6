//! The trait of attention engines, and the portable engine.

use std::fmt::Debug;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::ops::{AttentionOp, Kernels, Pass};
use super::problem::{
    AttentionGradients, AttentionInputs, AttentionOutputs, AttentionProblem, BackwardInputs,
    ProjectionGradients, Projections,
};
use crate::cpu::wide;
use crate::flat::accumulate;
use crate::function::Tensors;
use crate::gradient::FlatGradients;
use crate::launch::launch;

/// An implementation of attention, forward and backward, on plain tensors (without autodiff).
///
/// [`Portable`] supports every problem on every device. Other engines support only some devices and problems, which
/// [`supports`](Self::supports) checks. For an unsupported problem, the attention functions panic. They never fall back
/// to another engine. The temporary memory of an engine must be linear in the sequence length.
pub trait AttentionEngine: Debug + Send + Sync {
    /// Returns the name of the engine for error messages.
    fn name(&self) -> &'static str;

    /// Checks whether the engine supports a problem.
    ///
    /// # Errors
    ///
    /// Returns a message with the unsupported property and the supported values.
    fn supports(&self, problem: &AttentionProblem) -> Result<(), String>;

    /// Computes the output and the log-sum-exp of each query. If [`with_max`](AttentionProblem::with_max) is set, also
    /// computes the largest score of each query.
    fn forward(&self, problem: &AttentionProblem, inputs: AttentionInputs) -> AttentionOutputs;

    /// Computes the gradients of queries, keys, values and the sink. For a joint projection, returns one joint
    /// gradient.
    fn backward(&self, problem: &AttentionProblem, inputs: BackwardInputs) -> AttentionGradients;
}

/// The portable attention engine, which supports every device. It uses SIMD code on the CPU, and tiles in shared memory
/// on CubeCL devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Portable;

impl AttentionEngine for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn supports(&self, _problem: &AttentionProblem) -> Result<(), String> {
        Ok(())
    }

    fn forward(&self, problem: &AttentionProblem, inputs: AttentionInputs) -> AttentionOutputs {
        Kernels::Portable.forward(problem, inputs)
    }

    fn backward(&self, problem: &AttentionProblem, inputs: BackwardInputs) -> AttentionGradients {
        Kernels::Portable.backward(problem, inputs)
    }
}

impl Kernels {
    /// Computes [`AttentionEngine::forward`]. Launches no kernel if no key is visible.
    pub(super) fn forward(
        self,
        problem: &AttentionProblem,
        AttentionInputs { projections, sink }: AttentionInputs,
    ) -> AttentionOutputs {
        if problem.is_empty() {
            return empty_result(problem, &projections, sink);
        }
        let mut inputs = projections.into_tensors();
        inputs.extend(sink.map(Tensor::into_dispatch));
        let ranges = problem.options.ranges.as_ref();
        inputs.extend(ranges.map(|ranges| ranges.of_queries().clone().into_dispatch()));
        let mut outputs = self.launch(problem, Pass::Forward, inputs).into_iter();
        let out = next_tensor(&mut outputs);
        if !problem.with_max {
            let lse = next_tensor(&mut outputs);
            let largest = None;
            return AttentionOutputs { out, lse, largest };
        }
        let statistics: Tensor<4> = next_tensor(&mut outputs);
        let part = |at| statistics.clone().narrow(0, at, 1).squeeze_dim::<3>(0);
        AttentionOutputs {
            out,
            lse: part(0),
            largest: Some(part(1)),
        }
    }

    /// Computes [`AttentionEngine::backward`]. Launches no kernel if no key is visible.
    pub(super) fn backward(
        self,
        problem: &AttentionProblem,
        given: BackwardInputs,
    ) -> AttentionGradients {
        let AttentionInputs { projections, sink } = given.inputs;
        let ((out, lse), dout, sums) = (given.result, given.dout, given.sums);
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
        let outputs = self.launch(problem, Pass::Backward { places }, inputs);
        let mut outputs = outputs.into_iter();
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

    fn launch(self, problem: &AttentionProblem, pass: Pass, inputs: Tensors) -> Tensors {
        let op = AttentionOp {
            problem: problem.clone(),
            kernels: self,
            pass,
        };
        launch(op, inputs)
    }
}

fn next_tensor<const D: usize>(tensors: &mut impl Iterator<Item = DispatchTensor>) -> Tensor<D> {
    match tensors.next() {
        Some(tensor) => Tensor::from_dispatch(tensor),
        None => unreachable!("a kernel returns the declared number of outputs"),
    }
}

/// Returns the result of a problem without visible keys.
fn empty_result(
    problem: &AttentionProblem,
    projections: &Projections,
    sink: Option<Tensor<1>>,
) -> AttentionOutputs {
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
    let largest = problem.with_max.then(|| lse.full_like(f64::NEG_INFINITY));
    AttentionOutputs { out, lse, largest }
}

/// Returns the gradient of the sink for a problem without visible keys. Its `lse` may include other keys.
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
