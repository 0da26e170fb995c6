//! The bias of a linear layer, for a later operation that adds the bias.

use burn::module::Param;
use burn::tensor::Tensor;
use burn_megatron_kernels::gradient::Parameter;

use super::anchored_value;
use super::hook::{fused_parameter, gradient_parameter};
use super::residual::BranchBias;

/// A bias `[out]` that has not been added to the output of its linear layer yet. If the value is dropped, the bias is
/// never added.
#[derive(Clone, Debug)]
pub struct Bias {
    param: Param<Tensor<1>>,
    product: Tensor<3>,
}

impl Bias {
    /// Wraps the bias of a layer whose output without the bias is `product`.
    pub(super) fn new(param: &Param<Tensor<1>>, product: &Tensor<3>) -> Self {
        Self {
            param: param.clone(),
            product: product.clone(),
        }
    }

    /// Returns the bias as a tensor. Its gradient is computed by the autodiff graph.
    pub fn into_tensor(self) -> Tensor<1> {
        anchored_value(&self.param, &self.product)
    }

    /// Returns the bias for a fused operation that adds it to `product` and computes its gradient.
    pub(super) fn into_parameter(self) -> Parameter {
        fused_parameter(&self.param, &self.product)
    }

    /// Returns the bias of a residual branch.
    pub(super) fn into_branch(self) -> BranchBias {
        let of_gradient = gradient_parameter(&self.param, &self.product);
        BranchBias {
            parameter: self.into_parameter(),
            of_gradient,
        }
    }
}
