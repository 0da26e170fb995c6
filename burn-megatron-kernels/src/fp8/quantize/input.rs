//! The input of a quantizer: a matrix, or the inputs of an activation.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::activation::{
    Activation, ActivationOptions, FusedActivation, activate, check_activation,
};
use crate::error::accept;

/// The matrix that a quantizer reads, in f32, f16, bf16 or f64. An f64 matrix is rounded to f32 before it is quantized.
#[derive(Clone, Debug)]
pub struct QuantizerInput {
    x: Tensor<2>,
    activation: Option<(Activation, Option<Tensor<1>>)>,
}

impl From<Tensor<2>> for QuantizerInput {
    fn from(x: Tensor<2>) -> Self {
        let activation = None;
        Self { x, activation }
    }
}

impl QuantizerInput {
    /// Creates an input from the output of [`activate`] with default options. `x` is `[rows, width]` and the bias is
    /// `[width]`. The quantizer computes the activation, rounds it to the type of `x` and quantizes it. The unquantized
    /// activation is not written to memory.
    ///
    /// # Panics
    ///
    /// Panics in the same cases as [`activate`].
    pub fn activated(x: Tensor<2>, bias: Option<Tensor<1>>, kind: Activation) -> Self {
        let width = bias.as_ref().map(|bias| bias.dims()[0]);
        accept(check_activation(&x.dims(), width, kind));
        let dtype = x.dtype();
        let bias = bias.map(|bias| bias.cast::<DType>(dtype));
        let activation = Some((kind, bias));
        Self { x, activation }
    }

    /// Returns the number of rows and the number of columns of the matrix.
    pub fn dims(&self) -> [usize; 2] {
        let [rows, width] = self.x.dims();
        match self.activation {
            Some((kind, _)) => [rows, kind.output_width(width)],
            None => [rows, width],
        }
    }

    /// Returns the device of the matrix.
    pub fn device(&self) -> Device {
        self.x.device()
    }

    /// Returns the values of the matrix. If the input is an activation, the function computes the activation.
    pub fn into_values(self) -> Tensor<2> {
        match self.activation {
            Some((kind, bias)) => activate(self.x, bias, None, kind, ActivationOptions::default()),
            None => self.x,
        }
    }

    /// Returns the activation and its inputs for an operation that computes the activation.
    pub(super) fn into_inputs(self) -> (Option<FusedActivation>, Vec<DispatchTensor>) {
        let Some((kind, bias)) = self.activation else {
            // The kernels compute in f32 and do not support f64.
            let x = match self.x.dtype() {
                DType::F64 => self.x.cast(FloatDType::F32),
                _ => self.x,
            };
            return (None, vec![x.into_dispatch()]);
        };
        let fused = FusedActivation {
            kind,
            options: ActivationOptions::default(),
            bias: bias.is_some(),
            weight: false,
        };
        let inputs = [
            Some(self.x.into_dispatch()),
            bias.map(Tensor::into_dispatch),
        ];
        (Some(fused), inputs.into_iter().flatten().collect())
    }
}
