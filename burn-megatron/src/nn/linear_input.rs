//! Inputs of linear layers. An input is a tensor, or an activation that the layer may compute while it reads its input.

use burn::tensor::Tensor;

use super::gelu_epilogue::GeluInput;
use super::{Activation, Bias};

/// The input of a linear layer, `[batch, seq, in]`.
#[derive(Clone, Debug)]
pub enum LinearInput {
    /// A tensor that is used unchanged.
    Values(Tensor<3>),
    /// An activation function of `x + bias`.
    Activation {
        /// The input of the activation function: `[batch, seq, in]`, or `[batch, seq, 2 in]` for a gated activation.
        x: Tensor<3>,
        /// The bias that is added to `x`, or `None` without a bias.
        bias: Option<Bias>,
        /// The activation function.
        activation: Activation,
        /// Whether the fused kernel of the activation function is used.
        fused: bool,
        /// Whether the layer recomputes the activation in the backward pass instead of saving it. This requires
        /// `fused`.
        recomputed: bool,
    },
    /// The output of GELU, which the matmul of the previous layer has computed.
    Gelu(GeluInput),
}

impl LinearInput {
    /// Returns the input as a tensor. Computes the activation if needed.
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
