//! The bias of a linear layer, for an operation that adds it later.

use burn::module::Param;
use burn::tensor::Tensor;
use burn_megatron_kernels::gradient::Parameter;

use super::anchored_value;
use super::hook::{fused_parameter, gradient_parameter};
use super::residual::BranchBias;

/// A bias `[out]` that has not been added to the product of its layer yet. If it is dropped, no bias is added.
#[derive(Clone, Debug)]
pub struct Bias {
    param: Param<Tensor<1>>,
    product: Tensor<3>,
}

impl Bias {
    /// Wraps the bias of a layer with this product.
    pub(super) fn new(param: &Param<Tensor<1>>, product: &Tensor<3>) -> Self {
        Self {
            param: param.clone(),
            product: product.clone(),
        }
    }

    /// Returns the values. Their gradient goes through the autodiff graph.
    pub fn into_tensor(self) -> Tensor<1> {
        anchored_value(&self.param, &self.product)
    }

    /// Returns the values for a fused operation on the product, which handles the gradient.
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
