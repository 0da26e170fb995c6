//! The matmul of the parallel linear layers.

use burn::backend::DispatchTensor;
use burn::module::Param;
use burn::tensor::{DType, Tensor};
use burn_megatron_kernels::activation::{self as kernels, ActivationFunction, ActivationOptions};
use burn_megatron_kernels::apply;
use burn_megatron_kernels::gradient::Parameter;

use super::arithmetic::{FloatArithmetic, LinearKernels};
use super::forward_context::is_tracked;
use super::fp8::{ActivatedLinear, Fp8Arithmetic, Fp8Layer};
use super::input_layout::InputLayout;
use super::layer_arithmetic::LayerArithmetic;
use super::linear_function::LinearFunction;
use super::linear_input::LinearInput;
use super::recompute::apply_discarding;
use super::weight::Weight;
use super::{Activation, Bias};

/// The settings of the matmul of a linear layer, and its operands except for the input.
pub struct LinearOperands<'a> {
    /// The weight: `[in, out]`, or `[out, in]` if `transposed` is set.
    pub(super) weight: &'a Param<Tensor<2>>,
    pub(super) transposed: bool,
    /// The bias: `[out]`.
    pub(super) bias: Option<Parameter>,
    /// The layout of the input, which determines the communication.
    pub(super) input: InputLayout,
    /// An additional term of the output, `[batch, seq, out]`, if the output is a sum over the ranks
    /// ([`InputLayout::SplitFeatures`]).
    pub(super) addend: Option<Tensor<3>>,
    /// The FP8 layer, if the matmul uses FP8.
    pub(super) fp8: Option<&'a Fp8Layer>,
    /// The settings of a matmul that does not use FP8.
    pub(super) kernels: LinearKernels,
}

impl<'a> LinearOperands<'a> {
    /// Creates the operands of a matmul in the dtype of the input, without a bias. Pass `true` as `kernels` for fused
    /// kernels without a BLAS library.
    pub fn new(
        weight: &'a Param<Tensor<2>>,
        input: InputLayout,
        kernels: impl Into<LinearKernels>,
    ) -> Self {
        Self {
            weight,
            transposed: false,
            bias: None,
            input,
            addend: None,
            fp8: None,
            kernels: kernels.into(),
        }
    }

    /// Returns the differentiable function and its inputs other than `x`. `anchor` is `x`, or the tensor from which `x`
    /// is computed. `may_save_codes` is true if `x` is the first input, so that its FP8 codes may be saved.
    pub(super) fn into_function(
        self,
        anchor: &Tensor<3>,
        may_save_codes: bool,
    ) -> (LinearFunction, Vec<DispatchTensor>) {
        let (weight, arithmetic) = match self.fp8 {
            Some(layer) => {
                let weight = Weight::unfetched(self.weight, anchor);
                let trains = weight.trains();
                let is_recorded = is_tracked(anchor) || trains;
                let is_whole = self.input.sequence_ranks().is_none();
                let saves_codes = may_save_codes && is_whole && trains;
                let arithmetic = Fp8Arithmetic::new(layer, is_recorded, saves_codes);
                (weight, LayerArithmetic::Fp8(arithmetic))
            }
            None => {
                let weight = Weight::of(self.weight, anchor);
                let weight = if self.transposed {
                    weight.transposed()
                } else {
                    weight
                };
                let arithmetic = FloatArithmetic {
                    kernels: self.kernels,
                    transposed: weight.is_transposed(),
                };
                (weight, LayerArithmetic::Float(arithmetic))
            }
        };
        let mut others = vec![weight.tensor.into_dispatch()];
        let bias = self.bias.and_then(|Parameter { value, destination }| {
            others.push(value.into_dispatch());
            destination
        });
        others.extend(self.addend.map(Tensor::into_dispatch));
        let function = LinearFunction {
            input: self.input,
            hooked: weight.hooked,
            bias,
            arithmetic,
        };
        (function, others)
    }

    /// Returns the property that prevents fusing GELU with this matmul, in its epilogue or as its input. Returns `None`
    /// if both are possible.
    pub(super) fn epilogue_obstacle(&self, has_adapter: bool) -> Option<&'static str> {
        let obstacles = [
            (self.fp8.is_some(), "FP8 layers (fp8)"),
            (has_adapter, "layers with adapters (lora)"),
            (
                self.input.in_chunks().is_some(),
                "exchanges in chunks (tp_comm_overlap)",
            ),
        ];
        let found = obstacles.into_iter().find(|(is_set, _)| *is_set);
        found.map(|(_, name)| name)
    }

    /// Returns whether the quantizer of the layer can compute this activation function while it reads its input.
    fn quantizes(&self, activation: Activation) -> bool {
        self.fp8.is_some_and(Fp8Layer::quantizes_activations)
            && activation.options() == ActivationOptions::default()
    }
}

/// Computes `x weight + bias` for `x` of shape `[batch, seq, in]`, with `weight` `[in, out]` and `bias` `[out]`.
/// Returns `[batch, seq, out]`.
///
/// If the input gradient is summed over ranks, the collective overlaps with the computation of the weight gradient. If
/// the sequence is split over the ranks, only this rank's part is saved. The backward pass gathers the complete
/// sequence again while it computes the input gradient (Korthikanti et al. 2022, arXiv:2205.05198).
pub fn linear(x: impl Into<LinearInput>, operands: LinearOperands<'_>) -> Tensor<3> {
    let x = match x.into() {
        // An MLP with this input has no FP8 layers and no collectives in chunks. The bias is added later.
        LinearInput::Gelu(gelu) => return gelu.product(operands),
        LinearInput::Activation {
            x,
            bias,
            activation,
            fused: true,
            recomputed: true,
        } => return recomputed_activation(x, bias, activation, operands),
        LinearInput::Activation {
            x,
            bias,
            activation,
            fused: true,
            ..
        } if operands.quantizes(activation) => {
            return quantized_activation(x, bias, activation.kernel(), operands);
        }
        x => x.into_values(),
    };
    let (product, others) = operands.into_function(&x, true);
    apply([vec![x.into_dispatch()], others].concat(), product)
}

/// Returns the matmul of an activation that is recomputed in the backward pass.
fn recomputed_activation(
    x: Tensor<3>,
    bias: Option<Bias>,
    activation: Activation,
    operands: LinearOperands<'_>,
) -> Tensor<3> {
    let mut inputs = vec![x.clone().into_dispatch()];
    let bias = bias.map(|bias| {
        let Parameter { value, destination } = bias.into_parameter();
        inputs.push(value.cast::<DType>(x.dtype()).into_dispatch());
        destination
    });
    let function =
        ActivationFunction::new(activation.kernel(), bias).with_options(activation.options());
    let (product, others) = operands.into_function(&x, false);
    let [y] = apply_discarding(function, inputs, product, others);
    y
}

/// Returns the FP8 matmul of an activation that the quantizer computes.
fn quantized_activation(
    x: Tensor<3>,
    bias: Option<Bias>,
    kind: kernels::Activation,
    operands: LinearOperands<'_>,
) -> Tensor<3> {
    let bias = bias.map(Bias::into_parameter);
    let is_constant = |bias: &Parameter| !is_tracked(&bias.value);
    if !is_tracked(&x) && !bias.as_ref().is_none_or(is_constant) {
        // The weight must be anchored to a tracked input.
        let options = ActivationOptions::default();
        return linear(
            kernels::activate_with(x, bias, None, kind, options),
            operands,
        );
    }
    let (product, others) = operands.into_function(&x, true);
    let mut inputs = [vec![x.into_dispatch()], others].concat();
    let destination = bias.map(|Parameter { value, destination }| {
        inputs.push(value.into_dispatch());
        destination
    });
    let activation = ActivationFunction::new(kind, destination);
    apply(
        inputs,
        ActivatedLinear {
            activation,
            product,
        },
    )
}
