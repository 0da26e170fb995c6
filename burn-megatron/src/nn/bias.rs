//! The bias of a linear layer, for an operation that adds it.

use burn::module::Param;
use burn::tensor::Tensor;
use burn_megatron_kernels::gradient::Parameter;

use super::anchored_value;
use super::hook::{fused_parameter, gradient_parameter};
use super::residual::BranchBias;

/// A bias `[out]` that has not been added to its layer's product yet. Dropping it leaves it out.
#[derive(Clone, Debug)]
pub struct Bias {
    param: Param<Tensor<1>>,
    product: Tensor<3>,
}

impl Bias {
    /// The bias of a layer with this product.
    pub(super) fn new(param: &Param<Tensor<1>>, product: &Tensor<3>) -> Self {
        Self {
            param: param.clone(),
            product: product.clone(),
        }
    }

    /// The values, whose gradient goes through the graph.
    pub fn into_tensor(self) -> Tensor<1> {
        anchored_value(&self.param, &self.product)
    }

    /// The values for a fused operation on the product, which passes the gradient on itself.
    pub(super) fn into_parameter(self) -> Parameter {
        fused_parameter(&self.param, &self.product)
    }

    /// The bias of a residual branch.
    pub(super) fn into_branch(self) -> BranchBias {
        let of_gradient = gradient_parameter(&self.param, &self.product);
        BranchBias {
            parameter: self.into_parameter(),
            of_gradient,
        }
    }
}
