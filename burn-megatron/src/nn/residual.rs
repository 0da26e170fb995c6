//! A residual stream whose last addition is left to the norm that follows.

use burn::tensor::Tensor;
use burn_megatron_kernels::dropout::bias_dropout_add_with;
use burn_megatron_kernels::gradient::Parameter;

/// A residual stream `[batch, seq, hidden]`, and the output of a branch with its bias that is still to be added.
///
/// [`Dropout::forward_add`](super::Dropout::forward_add) returns it, at the end of a branch.
/// [`Norm::forward_add`](super::Norm::forward_add) adds and normalises in one operation, which may be in the next
/// block; where no norm follows, as at the end of a pipeline stage or of a [recomputed](super::recompute) block,
/// [`sum`](Self::sum) adds.
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
/// Dropping it loses the branch, whose bias then has no gradient.
#[derive(Debug)]
#[must_use]
pub struct Residual {
    pub(super) stream: Tensor<3>,
    pub(super) branch: Option<Branch>,
}

/// The output of a branch `[batch, seq, hidden]`, and its bias `[hidden]`.
///
/// The value of the bias was read where the branch ran: under full sharding its block may be resharded since.
#[derive(Debug)]
pub(super) struct Branch {
    pub output: Tensor<3>,
    pub bias: Option<Parameter>,
}

impl From<Tensor<3>> for Residual {
    fn from(stream: Tensor<3>) -> Self {
        let branch = None;
        Self { stream, branch }
    }
}

impl Residual {
    /// The stream, with the branch added to it: `(output + bias) + stream`.
    pub fn sum(self) -> Tensor<3> {
        match self.branch {
            None => self.stream,
            Some(Branch { output, bias: None }) => self.stream + output,
            Some(Branch { output, bias }) => {
                bias_dropout_add_with(output, bias, Some(self.stream), None)
            }
        }
    }
}
