//! Inputs of linear layers: values, or an activation that the layer may compute while it reads its input.

use burn::tensor::Tensor;

use super::gelu_epilogue::GeluInput;
use super::{Activation, Bias};

/// The input of a linear layer, `[batch, seq, in]`.
#[derive(Clone, Debug)]
pub enum LinearInput {
    /// The values, unchanged.
    Values(Tensor<3>),
    /// An activation of `x + bias`.
    Activation {
        /// `[batch, seq, in]`, or `[batch, seq, 2 in]` for a gated activation.
        x: Tensor<3>,
        /// The bias, or `None` without a bias.
        bias: Option<Bias>,
        /// The activation function.
        activation: Activation,
        /// Whether the activation may be fused into one operation.
        fused: bool,
        /// Whether the layer recomputes the activation in the backward instead of keeping it. Requires `fused`.
        recomputed: bool,
    },
    /// The output of GELU, computed by the previous product.
    Gelu(GeluInput),
}

impl LinearInput {
    /// Returns the values, and computes the activation if needed.
    pub fn into_values(self) -> Tensor<3> {
        match self {
            Self::Values(x) => x,
            Self::Activation {
                x,
                bias,
                activation,
                fused,
                ..
            } => activation.forward_biased(x, bias, fused),
            Self::Gelu(gelu) => unreachable!("only the product of an MLP reads {gelu:?}"),
        }
    }
}

impl From<Tensor<3>> for LinearInput {
    fn from(x: Tensor<3>) -> Self {
        Self::Values(x)
    }
}
