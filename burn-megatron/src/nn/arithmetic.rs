//! The operands of the three matmuls of a linear layer, and matmuls in the dtype of the input.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::gemm::Blas;
use burn_megatron_kernels::gradient::{FlatGradients, Place};
use burn_megatron_kernels::{flat, gemm};

use super::fp8::QuantizedWeight;
use super::hook::Pass;
use super::product_span::{product_span, weight_gradient_span};
use super::weight::HookedWeight;
use crate::collective::PendingTensor;

/// The source of the weight for a matmul.
pub(super) enum WeightSource<'a> {
    /// The weight from the autodiff graph.
    Graph(Tensor<2>),
    /// The weight from its parameter hook.
    Hook(&'a HookedWeight),
    /// The rowwise and the columnwise FP8 copy of the weight.
    Quantized(&'a Arc<QuantizedWeight>),
}

impl WeightSource<'_> {
    /// Returns the weight as a floating-point tensor.
    pub fn value(self, pass: Pass) -> Tensor<2> {
        match self {
            Self::Graph(weight) => weight,
            Self::Hook(hooked) => hooked.value(pass),
            Self::Quantized(_) => unreachable!("a product in 8 bits reads the copies"),
        }
    }
}

/// The tensors that a forward pass saves for the backward pass.
#[derive(Default)]
pub(super) struct SavedTensors {
    /// The FP8 codes and scales of the input, which are saved instead of the input.
    pub input_codes: Option<[DispatchTensor; 2]>,
    /// Tensors that are saved in addition to the input.
    pub extra: Vec<DispatchTensor>,
}

/// The saved input, as the backward pass reads it.
pub(super) enum SavedInput {
    /// The input as floats. If the sequence is split, the all-gather of the input may still be in flight.
    Floats(PendingTensor<3>),
    /// The FP8 codes and scales of the input.
    Codes([DispatchTensor; 2]),
}

/// The gradients that a backward pass has to compute.
#[derive(Clone, Copy, Debug)]
pub(super) struct NeededGradients {
    pub input: bool,
    pub weight: bool,
}

/// The kernel settings of linear layers that do not use FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearKernels {
    /// Whether the matmuls are fused with the bias addition and with the accumulation of weight gradients.
    pub fused: bool,
    /// The BLAS library for fused matmuls on the CPU. `None` uses the `gemm` crate.
    pub blas: Option<Blas>,
}

impl From<bool> for LinearKernels {
    /// Returns fused (`true`) or unfused (`false`) kernels, without a BLAS library.
    fn from(fused: bool) -> Self {
        Self { fused, blas: None }
    }
}

/// Matmuls in the dtype of the input.
#[derive(Clone, Copy, Debug)]
pub(super) struct FloatArithmetic {
    pub kernels: LinearKernels,
    /// Whether the weight gradient is stored as `[out, in]`.
    pub transposed: bool,
}

impl FloatArithmetic {
    /// Returns `x weight + bias`.
    pub fn product(&self, x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
        let _span = product_span(&x, weight.dims()[1]);
        if self.kernels.fused {
            gemm::linear_by(self.kernels.blas, x, weight, bias)
        } else {
            gemm::composed::linear(x, weight, bias)
        }
    }

    /// Returns `dy weight^T`.
    pub fn input_gradient(&self, dy: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
        self.product(dy, weight.transpose(), None)
    }

    /// Computes the flattened weight gradient `x^T dy`. If `target` is given, it must describe a single place in a flat
    /// buffer, and the gradient is written to this place.
    pub fn weight_gradient(
        &self,
        x: Tensor<2>,
        dy: Tensor<2>,
        target: Option<FlatGradients>,
    ) -> Tensor<1> {
        let (left, right) = if self.transposed { (dy, x) } else { (x, dy) };
        let _span = weight_gradient_span(&left, right.dims()[1]);
        let Some(FlatGradients { flat, places }) = target else {
            return flatten(left.transpose().matmul(right));
        };
        let Place { offset, add } = places[0];
        // The fused matmul accumulates only into f32 or f64 buffers, not into 16-bit buffers.
        if self.kernels.fused && flat.dtype().size() >= 4 {
            let blas = self.kernels.blas;
            return gemm::accumulate_weight_gradient_at_by(blas, left, right, flat, offset, add);
        }
        flat::accumulate(flat, offset, flatten(left.transpose().matmul(right)), add)
    }
}

/// Returns an input that was saved as a floating-point tensor, with the shape `[rows, in]`.
pub(super) fn floats(x: SavedInput) -> Tensor<2> {
    match x {
        SavedInput::Floats(x) => rows(x.wait()),
        SavedInput::Codes(_) => unreachable!("this arithmetic saves the input as floats"),
    }
}

/// Reshapes `[batch, seq, width]` to `[batch * seq, width]`.
pub(super) fn rows(x: Tensor<3>) -> Tensor<2> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch * seq, width])
}

/// Reshapes `[a, b]` to `[a * b]`.
pub(super) fn flatten(x: Tensor<2>) -> Tensor<1> {
    let len = x.shape().num_elements();
    x.reshape([len])
}
