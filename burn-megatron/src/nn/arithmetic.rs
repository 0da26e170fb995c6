//! The arithmetic of a linear layer: its three matrix products, without communication.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::gemm::Blas;
use burn_megatron_kernels::gradient::{FlatGradients, Place};
use burn_megatron_kernels::{flat, gemm};

use super::fp8::QuantizedWeight;
use super::hook::Pass;
use super::linear::rows;
use super::matmul_clock::{product_span, weight_gradient_span};
use super::weight::HookedWeight;
use crate::collective::PendingTensor;

/// The three products of a linear layer.
///
/// All tensors are plain; inputs and gradients of outputs are `[rows, width]`, weights `[in, out]`.
pub(super) trait LinearArithmetic: Clone + Debug + Send + Sync + 'static {
    /// Whether it reads a hooked weight from the sink itself, in the form in which the sink holds it.
    const FETCHES_WEIGHT: bool;

    /// The gradient of the output, as the other two products read it.
    type Gradient: Clone + Send + 'static;

    /// `x weight + bias`, and what the backward needs of it.
    fn output(
        &self,
        x: Tensor<2>,
        weight: WeightSource<'_>,
        bias: Option<Tensor<1>>,
    ) -> (Tensor<2>, SavedTensors);

    /// Whether the forward saves [codes](SavedTensors::input_codes) in place of the input.
    fn saves_codes(&self) -> bool;

    /// Prepares the gradient of the output for the gradients that are needed.
    fn gradient(&self, dy: Tensor<2>, needed: NeededGradients) -> Self::Gradient;

    /// `dy weight^T`. `extra` is what the forward saved in addition to the input.
    fn input_gradient(
        &self,
        dy: &Self::Gradient,
        weight: WeightSource<'_>,
        extra: &[DispatchTensor],
    ) -> Tensor<2>;

    /// `x^T dy`.
    fn weight_gradient(
        &self,
        x: SavedInput,
        dy: Self::Gradient,
        extra: &[DispatchTensor],
    ) -> Tensor<2>;

    /// The same, flat; at the one place of `target` where there is one.
    fn weight_gradient_into(
        &self,
        x: SavedInput,
        dy: Self::Gradient,
        extra: &[DispatchTensor],
        target: Option<FlatGradients>,
    ) -> Tensor<1>;
}

/// Where a product gets its weight.
pub(super) enum WeightSource<'a> {
    /// From the graph.
    Graph(Tensor<2>),
    /// From its hook; stored as `[out, in]` if the flag is set.
    Hook(&'a HookedWeight, bool),
    /// Both copies of the weight in 8 bits.
    Quantized(&'a Arc<QuantizedWeight>),
}

impl WeightSource<'_> {
    /// The value, as floats.
    pub fn value(self, pass: Pass) -> Tensor<2> {
        match self {
            Self::Graph(weight) => weight,
            Self::Hook(hooked, false) => hooked.value(pass),
            Self::Hook(hooked, true) => hooked.value(pass).transpose(),
            Self::Quantized(_) => unreachable!("a product in 8 bits reads the copies"),
        }
    }
}

/// The tensors that a forward saves for the backward.
#[derive(Default)]
pub(super) struct SavedTensors {
    /// The 8-bit codes and scales of the input, saved in place of it.
    pub input_codes: Option<[DispatchTensor; 2]>,
    /// In addition to the input.
    pub extra: Vec<DispatchTensor>,
}

/// The input, in the backward.
pub(super) enum SavedInput {
    /// Floats; the gather of a split sequence may still be in flight.
    Floats(PendingTensor<3>),
    /// The 8-bit codes and scales.
    Codes([DispatchTensor; 2]),
}

/// Which gradients are needed.
#[derive(Clone, Copy, Debug)]
pub(super) struct NeededGradients {
    pub input: bool,
    pub weight: bool,
}

/// The settings of matrix products that are not in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearKernels {
    /// Whether products add the bias, and earlier weight gradients, themselves.
    pub fused: bool,
    /// The library that multiplies on the CPU in fused products, if not the `gemm` crate.
    pub blas: Option<Blas>,
}

impl From<bool> for LinearKernels {
    /// Fused or not, by the default engine.
    fn from(fused: bool) -> Self {
        Self { fused, blas: None }
    }
}

/// Products in the type of the input.
#[derive(Clone, Debug)]
pub(super) struct FloatArithmetic {
    pub kernels: LinearKernels,
    /// Whether the weight gradient is stored as `[out, in]`.
    pub transposed: bool,
}

impl FloatArithmetic {
    fn product(&self, x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
        let _span = product_span(&x, weight.dims()[1]);
        if self.kernels.fused {
            gemm::linear_by(self.kernels.blas, x, weight, bias)
        } else {
            gemm::composed::linear(x, weight, bias)
        }
    }
}

impl LinearArithmetic for FloatArithmetic {
    const FETCHES_WEIGHT: bool = false;

    type Gradient = Tensor<2>;

    fn output(
        &self,
        x: Tensor<2>,
        weight: WeightSource<'_>,
        bias: Option<Tensor<1>>,
    ) -> (Tensor<2>, SavedTensors) {
        let y = self.product(x, weight.value(Pass::Forward), bias);
        (y, SavedTensors::default())
    }

    fn saves_codes(&self) -> bool {
        false
    }

    fn gradient(&self, dy: Tensor<2>, _needed: NeededGradients) -> Tensor<2> {
        dy
    }

    fn input_gradient(
        &self,
        dy: &Tensor<2>,
        weight: WeightSource<'_>,
        _extra: &[DispatchTensor],
    ) -> Tensor<2> {
        let weight = weight.value(Pass::Backward);
        self.product(dy.clone(), weight.transpose(), None)
    }

    fn weight_gradient(
        &self,
        x: SavedInput,
        dy: Tensor<2>,
        _extra: &[DispatchTensor],
    ) -> Tensor<2> {
        weight_gradient(floats(x), dy)
    }

    fn weight_gradient_into(
        &self,
        x: SavedInput,
        dy: Tensor<2>,
        _extra: &[DispatchTensor],
        target: Option<FlatGradients>,
    ) -> Tensor<1> {
        let (left, right) = if self.transposed {
            (dy, floats(x))
        } else {
            (floats(x), dy)
        };
        let Some(FlatGradients { flat, places }) = target else {
            return flatten(weight_gradient(left, right));
        };
        let Place { offset, add } = places[0];
        // The fused product accumulates in f32 or f64 only, not in 16 bits.
        if self.kernels.fused && flat.dtype().size() >= 4 {
            let _span = weight_gradient_span(&left, right.dims()[1]);
            let blas = self.kernels.blas;
            return gemm::accumulate_weight_gradient_at_by(blas, left, right, flat, offset, add);
        }
        flat::accumulate(flat, offset, flatten(weight_gradient(left, right)), add)
    }
}

/// `left^T right`, of `[rows, a]` and `[rows, b]`.
fn weight_gradient(left: Tensor<2>, right: Tensor<2>) -> Tensor<2> {
    let _span = weight_gradient_span(&left, right.dims()[1]);
    left.transpose().matmul(right)
}

/// An input that was saved as floats.
fn floats(x: SavedInput) -> Tensor<2> {
    match x {
        SavedInput::Floats(x) => rows(x.wait()),
        SavedInput::Codes(_) => unreachable!("this arithmetic saves the input as floats"),
    }
}

/// `[a, b]` to `[a b]`.
pub(super) fn flatten(x: Tensor<2>) -> Tensor<1> {
    let len = x.shape().num_elements();
    x.reshape([len])
}
