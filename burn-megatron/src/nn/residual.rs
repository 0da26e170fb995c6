//! A residual stream whose last addition is fused into the next norm.

use burn::tensor::Tensor;
use burn_megatron_kernels::column_sum::bias_gradient;
use burn_megatron_kernels::dropout::bias_dropout_add_with;
use burn_megatron_kernels::gradient::Parameter;
use burn_megatron_kernels::norm::StreamNorm;

use super::forward_context::is_tracked;
use super::unsaved::identity;

/// A residual stream `[batch, seq, hidden]`, together with the output and the bias of a branch that have not been added
/// yet.
///
/// [`Dropout::forward_add`](super::Dropout::forward_add) returns a `Residual` at the end of a branch. The next norm,
/// which may be in the next block, adds the branch and normalizes the sum in one operation
/// ([`Norm::forward_add`](super::Norm::forward_add)). If no norm follows, for example at the end of a pipeline stage,
/// call [`sum`](Self::sum).
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_megatron::nn::{ActivationLayout, Dropout, Norm, ParallelMlp, Residual};
///
/// /// `x + dropout(mlp(norm(x)))`, without the last addition.
/// fn block(norm: &Norm, mlp: &ParallelMlp, dropout: &Dropout, x: Residual) -> Residual {
///     let (normal, x) = norm.forward_add(x);
///     let (fed, bias) = mlp.forward_without_bias(normal);
///     dropout.forward_add(fed, bias, x, ActivationLayout::Whole)
/// }
/// ```
///
/// If a `Residual` value is dropped, the output of its branch is lost, and the bias of the branch gets no gradient.
#[derive(Debug)]
#[must_use]
pub struct Residual {
    pub(super) stream: Tensor<3>,
    pub(super) branch: Option<Branch>,
    /// A bias that is included in the stream. The next norm computes its gradient.
    pub(super) added_bias: Option<Parameter>,
}

/// The output of a branch `[batch, seq, hidden]`, and its bias `[hidden]`.
///
/// The bias is read when the branch runs, because under full sharding its block may be resharded afterwards.
#[derive(Debug)]
pub(super) struct Branch {
    pub output: Tensor<3>,
    pub bias: Option<BranchBias>,
}

/// A bias that is added to the stream together with its branch.
#[derive(Debug)]
pub(super) struct BranchBias {
    pub parameter: Parameter,
    /// The bias for the operation that computes its gradient after the addition. It does not keep the value alive. With
    /// `None` the autodiff graph computes the gradient.
    pub of_gradient: Option<Parameter>,
}

impl From<Tensor<3>> for Residual {
    fn from(stream: Tensor<3>) -> Self {
        Self::from_parts(stream, None)
    }
}

impl Residual {
    /// Adds the output and the bias of the branch to the residual stream, and returns the sum:
    /// `(output + bias) + stream`.
    pub fn sum(self) -> Tensor<3> {
        let stream = self.stream;
        match (self.branch, self.added_bias) {
            (None, None) => stream,
            (None, Some(Parameter { destination, .. })) => {
                let inputs = vec![stream.into_dispatch()];
                identity("BiasGradient", inputs, move |gradient| {
                    bias_gradient(gradient.clone(), None, destination.as_ref());
                    vec![Some(gradient)]
                })
            }
            (Some(Branch { output, bias: None }), _) => stream + output,
            (Some(Branch { output, bias }), _) => {
                let bias = bias.map(|bias| bias.parameter);
                bias_dropout_add_with(output, bias, Some(stream), None)
            }
        }
    }

    /// Returns the sum and the bias of the branch. [`from_parts`](Self::from_parts) creates the same stream for a
    /// norm.
    ///
    /// A recomputed region keeps its input, so it begins and ends with a sum. The gradients are bit-identical to the
    /// gradients of an undivided stream, because the kernel of the following norm sums the gradient of the bias.
    pub(super) fn into_parts(self) -> (Tensor<3>, Option<Parameter>) {
        match self.branch {
            None => (self.stream, self.added_bias),
            Some(Branch {
                output,
                bias:
                    Some(BranchBias {
                        parameter,
                        of_gradient: Some(of_gradient),
                    }),
            }) => {
                let constant = Parameter::from(parameter.value);
                let stream = Some(self.stream);
                let sum = bias_dropout_add_with(output, Some(constant), stream, None);
                (sum, Some(of_gradient))
            }
            // The gradient of the bias goes through the graph.
            branch => (Self { branch, ..self }.sum(), None),
        }
    }

    /// Returns the operands of a fused norm.
    pub(super) fn for_norm(self) -> StreamNorm<3> {
        match self.branch {
            Some(Branch { output, bias }) => StreamNorm {
                x: output,
                residual: Some(self.stream),
                x_bias: bias.map(|bias| bias.parameter),
            },
            None => StreamNorm {
                // A first pass computes no gradient.
                x_bias: self.added_bias.filter(|_| is_tracked(&self.stream)),
                x: self.stream,
                residual: None,
            },
        }
    }

    /// Creates the stream of a sum, and the bias in it whose gradient a norm computes.
    pub(super) fn from_parts(sum: Tensor<3>, added_bias: Option<Parameter>) -> Self {
        Self {
            stream: sum,
            branch: None,
            added_bias,
        }
    }
}
