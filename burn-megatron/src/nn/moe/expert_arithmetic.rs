//! The arithmetic of an expert in a product of experts: in 8 bits, or in the type of its rows.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use crate::nn::arithmetic::{
    FloatArithmetic, LinearArithmetic, NeededGradients, SavedInput, SavedTensors, WeightSource,
};
use crate::nn::fp8::{Fp8Arithmetic, QuantizedWeight};
use crate::nn::hook::WeightGradientFn;

#[derive(Debug)]
pub(super) enum ExpertArithmetic {
    Float(FloatArithmetic),
    /// With both copies of the weight, where they are cached.
    Fp8(Fp8Arithmetic, Option<Arc<QuantizedWeight>>),
}

impl ExpertArithmetic {
    pub fn saves_codes(&self) -> bool {
        match self {
            Self::Float(arithmetic) => arithmetic.saves_codes(),
            Self::Fp8(arithmetic, _) => arithmetic.saves_codes(),
        }
    }

    /// Whether it reads the values of the weight.
    pub fn reads_weight(&self) -> bool {
        !matches!(self, Self::Fp8(_, Some(_)))
    }

    /// The number of tensors that it saves in addition to the input.
    pub fn extras(&self) -> usize {
        match self {
            Self::Float(_) => 0,
            Self::Fp8(arithmetic, weight) => arithmetic.saved_scales(weight.is_some()),
        }
    }

    /// The cached copies of the weight, or else its values.
    pub fn weight(&self, value: impl FnOnce() -> Tensor<2>) -> WeightSource<'_> {
        match self {
            Self::Fp8(_, Some(weight)) => WeightSource::Quantized(weight),
            _ => WeightSource::Graph(value()),
        }
    }

    pub fn output(
        &self,
        x: Tensor<2>,
        weight: impl FnOnce() -> Tensor<2>,
    ) -> (Tensor<2>, SavedTensors) {
        let weight = self.weight(weight);
        match self {
            Self::Float(arithmetic) => arithmetic.output(x, weight, None),
            Self::Fp8(arithmetic, _) => arithmetic.output(x, weight, None),
        }
    }

    pub fn gradients(
        &self,
        saved: SavedExpert,
        dy: Tensor<2>,
        weight: impl FnOnce() -> Tensor<2>,
        needed: NeededGradients,
    ) -> ExpertGradients {
        let weight = self.weight(weight);
        match self {
            Self::Float(arithmetic) => gradients(arithmetic, saved, dy, weight, needed),
            Self::Fp8(arithmetic, _) => gradients(arithmetic, saved, dy, weight, needed),
        }
    }
}

/// The tensors that the forward of an expert saved.
pub(super) struct SavedExpert {
    pub x: SavedInput,
    pub extra: Vec<DispatchTensor>,
}

/// The gradient of its rows, and the computation of that of its weight.
pub(super) type ExpertGradients = (Option<Tensor<2>>, WeightGradientFn);

fn gradients<A: LinearArithmetic>(
    arithmetic: &A,
    SavedExpert { x, extra }: SavedExpert,
    dy: Tensor<2>,
    weight: WeightSource<'_>,
    needed: NeededGradients,
) -> ExpertGradients {
    let dy = arithmetic.gradient(dy, needed);
    let of_x = needed
        .input
        .then(|| arithmetic.input_gradient(&dy, weight, &extra));
    let arithmetic = arithmetic.clone();
    let of_weight = move |target| arithmetic.weight_gradient_into(x, dy, &extra, target);
    (of_x, Box::new(of_weight))
}
