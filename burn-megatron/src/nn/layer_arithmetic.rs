//! The arithmetic of a linear layer: in the dtype of its input, or in FP8.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::gradient::FlatGradients;

use super::arithmetic::{
    FloatArithmetic, NeededGradients, SavedInput, SavedTensors, WeightSource, floats,
};
use super::fp8::{Fp8Arithmetic, Fp8Gradient};
use super::hook::Pass;

/// The three matmuls of a linear layer or of one expert.
///
/// No tensor is tracked by autodiff. Inputs and output gradients have the shape `[rows, width]`, and weights have the
/// shape `[in, out]`.
#[derive(Clone, Debug)]
pub(super) enum LayerArithmetic {
    Float(FloatArithmetic),
    Fp8(Fp8Arithmetic),
}

impl LayerArithmetic {
    /// Returns `x weight + bias`, and the tensors that the backward pass needs.
    pub fn output(
        &self,
        x: Tensor<2>,
        weight: WeightSource<'_>,
        bias: Option<Tensor<1>>,
    ) -> (Tensor<2>, SavedTensors) {
        match self {
            Self::Float(float) => {
                let y = float.product(x, weight.value(Pass::Forward), bias);
                (y, SavedTensors::default())
            }
            Self::Fp8(fp8) => fp8.output(x, weight, bias),
        }
    }

    /// Returns whether a hooked weight is read directly from the sink, in the form in which the sink holds it.
    pub fn fetches_weight(&self) -> bool {
        matches!(self, Self::Fp8(_))
    }

    /// Returns whether the forward pass saves [codes](SavedTensors::input_codes) in place of the input.
    pub fn saves_codes(&self) -> bool {
        matches!(self, Self::Fp8(fp8) if fp8.saves_codes())
    }

    /// Returns the number of tensors that a forward pass saves in addition to the input. `has_copies` is true if both
    /// FP8 copies of the weight were available.
    pub fn saved_extras(&self, has_copies: bool) -> usize {
        match self {
            Self::Float(_) => 0,
            Self::Fp8(fp8) => fp8.saved_scales(has_copies),
        }
    }

    /// Prepares the gradient of the output for the computation of the needed gradients.
    pub fn gradient(&self, dy: Tensor<2>, needed: NeededGradients) -> OutputGradient {
        match self {
            Self::Float(float) => OutputGradient::Float(*float, dy),
            Self::Fp8(fp8) => OutputGradient::Fp8(fp8.clone(), Box::new(fp8.gradient(dy, needed))),
        }
    }
}

/// The gradient of an output, in the form that the two matmuls of the backward pass read.
pub(super) enum OutputGradient {
    Float(FloatArithmetic, Tensor<2>),
    Fp8(Fp8Arithmetic, Box<Fp8Gradient>),
}

impl OutputGradient {
    /// Returns `dy weight^T`. `extra` are the tensors that the forward pass saved in addition to the input.
    pub fn input(&self, weight: WeightSource<'_>, extra: &[DispatchTensor]) -> Tensor<2> {
        match self {
            Self::Float(float, dy) => {
                float.input_gradient(dy.clone(), weight.value(Pass::Backward))
            }
            Self::Fp8(fp8, dy) => fp8.input_gradient(dy, weight, extra),
        }
    }

    /// Computes the flattened weight gradient `x^T dy`. If `target` is given, it must describe a single place in a flat
    /// buffer, and the gradient is written to this place.
    pub fn weight(
        self,
        x: SavedInput,
        extra: &[DispatchTensor],
        target: Option<FlatGradients>,
    ) -> Tensor<1> {
        match self {
            Self::Float(float, dy) => float.weight_gradient(floats(x), dy, target),
            Self::Fp8(fp8, dy) => fp8.weight_gradient(x, *dy, extra, target),
        }
    }
}
