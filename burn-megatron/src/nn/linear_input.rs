//! The input of a linear layer: values, or an activation that the layer may compute as it reads them.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_megatron_kernels::activation::ActivationFunction;
use burn_megatron_kernels::gradient::Parameter;

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
        /// The bias, if there is one.
        bias: Option<Bias>,
        /// The nonlinearity.
        activation: Activation,
        /// Whether it may be one operation.
        fused: bool,
        /// Whether the layer computes it again in the backward, instead of keeping it; only if it is fused.
        recomputed: bool,
    },
    /// GELU, which the product before has computed.
    Gelu(GeluInput),
}

/// The inputs and the function of a [recomputed](LinearInput::Activation) activation.
pub(super) type DiscardedActivation = (Tensor<3>, (ActivationFunction, Vec<DispatchTensor>));

impl LinearInput {
    /// An activation that is not kept: its input, and the operation with all of its inputs. Otherwise the input as it
    /// is.
    pub(super) fn into_discarded(self) -> Result<DiscardedActivation, Box<Self>> {
        let Self::Activation {
            x,
            bias,
            activation,
            fused: true,
            recomputed: true,
        } = self
        else {
            return Err(Box::new(self));
        };
        let mut inputs = vec![x.clone().into_dispatch()];
        let bias = bias.map(|bias| {
            let Parameter { value, destination } = bias.into_parameter();
            inputs.push(value.cast::<DType>(x.dtype()).into_dispatch());
            destination
        });
        let function =
            ActivationFunction::new(activation.kernel(), bias).with_options(activation.options());
        Ok((x, (function, inputs)))
    }

    /// The values; computes the activation.
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
