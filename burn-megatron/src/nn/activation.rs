//! Activations of the MLP, each with a backward in one step.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn::tensor::activation::{gelu, sigmoid};
use burn_megatron_kernels::{Function, apply};
use serde::{Deserialize, Serialize};

/// The nonlinearity of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// `x Phi(x)`, exact (Hendrycks and Gimpel 2016).
    Gelu,
    /// Its tanh approximation, as in GPT-2.
    GeluTanh,
    /// `a sigmoid(a) b` of the two halves `a` and `b` of the last dim (Shazeer 2020).
    SwiGlu,
}

impl Activation {
    /// Whether the input is twice as wide as the output.
    pub fn is_gated(self) -> bool {
        self == Self::SwiGlu
    }

    /// `[batch, seq, width]`; a gated one halves the last dim.
    pub fn forward(self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Gelu => gelu(x),
            Self::GeluTanh => apply(vec![x.into_dispatch()], GeluTanh),
            Self::SwiGlu => apply(vec![x.into_dispatch()], SwiGlu),
        }
    }
}

/// `0.5 x (1 + tanh(u))` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
#[derive(Debug)]
struct GeluTanh;

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

impl GeluTanh {
    fn tanh(x: Tensor<3>) -> Tensor<3> {
        let square = (x.clone() * x.clone()).mul_scalar(CUBIC).add_scalar(1.0);
        (x * square).mul_scalar(SQRT_2_OVER_PI).tanh()
    }
}

impl Function for GeluTanh {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let x = Tensor::<3>::from_dispatch(inputs.remove(0));
        let tanh = Self::tanh(x.clone());
        let y = (tanh.clone().add_scalar(1.0) * x.clone()).mul_scalar(0.5);
        (
            y.into_dispatch(),
            vec![x.into_dispatch(), tanh.into_dispatch()],
        )
    }

    /// `dy/dx = 0.5 (1 + t) + 0.5 x (1 - t^2) du/dx`.
    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let [x, t] = two(saved);
        let slope = (x.clone() * x.clone())
            .mul_scalar(3.0 * CUBIC * SQRT_2_OVER_PI)
            .add_scalar(SQRT_2_OVER_PI);
        let curved = (t.clone() * t.clone()).neg().add_scalar(1.0) * x * slope;
        let derivative = (t.add_scalar(1.0) + curved).mul_scalar(0.5);
        vec![Some(
            (Tensor::from_dispatch(gradient) * derivative).into_dispatch(),
        )]
    }
}

#[derive(Debug)]
struct SwiGlu;

impl Function for SwiGlu {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let x = Tensor::<3>::from_dispatch(inputs.remove(0));
        let (a, b) = halves(x);
        let gate = sigmoid(a.clone());
        let y = a.clone() * gate.clone() * b.clone();
        (
            y.into_dispatch(),
            [a, b, gate].map(Tensor::into_dispatch).to_vec(),
        )
    }

    /// `da = g s (1 + a (1 - s)) b`, `db = g a s`, with `s = sigmoid(a)`.
    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let gate = Tensor::<3>::from_dispatch(saved.remove(2));
        let [a, b] = two(saved);
        let gradient = Tensor::<3>::from_dispatch(gradient);
        let slope = (gate.clone().neg().add_scalar(1.0) * a.clone()).add_scalar(1.0);
        let da = gradient.clone() * gate.clone() * slope * b;
        let db = gradient * a * gate;
        vec![Some(Tensor::cat(vec![da, db], 2).into_dispatch())]
    }
}

fn halves(x: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    let half = x.dims()[2] / 2;
    (x.clone().narrow(2, 0, half), x.narrow(2, half, half))
}

fn two(tensors: Vec<DispatchTensor>) -> [Tensor<3>; 2] {
    let mut tensors = tensors.into_iter().map(Tensor::from_dispatch);
    match (tensors.next(), tensors.next()) {
        (Some(first), Some(second)) => [first, second],
        _ => unreachable!("the forward saves two tensors and more"),
    }
}
