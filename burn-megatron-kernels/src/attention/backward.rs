//! Attention as an autodiff [`Function`](crate::Function).

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::engine::AttentionEngine;
use super::problem::{
    AttentionInputs, AttentionOutputs, AttentionProblem, BackwardInputs, ProjectionGradients,
    Projections,
};
use crate::function::{Function, Gradients, Tensors};

/// Attention with an engine. The inputs are queries, keys and values (or the joint projection), then the optional sink.
///
/// The function saves the inputs, the output and one log-sum-exp per query and head for the backward pass.
#[derive(Debug)]
pub(super) struct Attention {
    pub engine: Arc<dyn AttentionEngine>,
    pub problem: AttentionProblem,
}

impl Function for Attention {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let mut saved = inputs.clone();
        let inputs = self.inputs(&mut inputs.into_iter());
        let AttentionOutputs { out, lse, .. } = self.engine.forward(&self.problem, inputs);
        saved.extend([out.clone().into_dispatch(), lse.into_dispatch()]);
        let out = if self.problem.packed {
            out.flatten::<3>(2, 3).into_dispatch()
        } else {
            out.into_dispatch()
        };
        (out, saved)
    }

    fn backward(&self, saved: Tensors, gradient: DispatchTensor, _needed: &[bool]) -> Gradients {
        let mut saved = saved.into_iter();
        let inputs = self.inputs(&mut saved);
        let result = (next(&mut saved), next(&mut saved));
        let dout = if self.problem.packed {
            Tensor::<3>::from_dispatch(gradient).reshape(self.problem.out_shape())
        } else {
            Tensor::from_dispatch(gradient)
        };
        let inputs = BackwardInputs {
            inputs,
            result,
            dout,
            sums: None,
        };
        let gradients = self.engine.backward(&self.problem, inputs);
        let mut list = match gradients.projections {
            ProjectionGradients::Separate { dq, dk, dv } => {
                [dq, dk, dv].map(Tensor::into_dispatch).to_vec()
            }
            ProjectionGradients::Packed(qkv) => vec![qkv.into_dispatch()],
            ProjectionGradients::Flat { .. } => unreachable!("no flat buffer was given"),
        };
        list.extend(gradients.dsink.map(Tensor::into_dispatch));
        list.into_iter().map(Some).collect()
    }
}

impl Attention {
    fn inputs(&self, tensors: &mut impl Iterator<Item = DispatchTensor>) -> AttentionInputs {
        let projections = if self.problem.packed {
            Projections::Packed(next(tensors))
        } else {
            Projections::Separate {
                q: next(tensors),
                k: next(tensors),
                v: next(tensors),
            }
        };
        AttentionInputs {
            projections,
            sink: self.problem.sink.then(|| next(tensors)),
        }
    }
}

fn next<const D: usize>(tensors: &mut impl Iterator<Item = DispatchTensor>) -> Tensor<D> {
    match tensors.next() {
        Some(tensor) => Tensor::from_dispatch(tensor),
        None => unreachable!("the problem says how many tensors there are"),
    }
}
