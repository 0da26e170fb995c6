//! LayerNorm and RMSNorm over the last dimension, with a backward in one step.

use burn::backend::DispatchTensor;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_megatron_kernels::{Function, apply};
use serde::{Deserialize, Serialize};

use super::{Init, ParameterSpec, Scope, value_at};

/// Which normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormKind {
    /// `(x - mean) / sqrt(variance + epsilon) * weight + bias` (Ba et al. 2016).
    Layer,
    /// `x / sqrt(mean of x^2 + epsilon) * weight` (Zhang and Sennrich 2019).
    Rms,
}

/// LayerNorm or RMSNorm of `[batch, seq, hidden]`.
///
/// Under sequence parallelism each rank normalises its part of the sequence, so the gradients of
/// weight and bias are summed over the tensor axis.
#[derive(Module, Debug)]
pub struct Norm {
    /// `[hidden]`, 1 at the start.
    pub weight: Param<Tensor<1>>,
    /// `[hidden]`, 0 at the start; LayerNorm only.
    pub bias: Option<Param<Tensor<1>>>,
    epsilon: f64,
}

impl Norm {
    /// A norm over `hidden` features.
    pub fn new(
        kind: NormKind,
        hidden: usize,
        epsilon: f64,
        sequence_parallel: bool,
        scope: &Scope,
    ) -> Self {
        let spec = |value| {
            ParameterSpec::new([hidden], Init::Constant(value))
                .with_partial_gradient(sequence_parallel)
        };
        Self {
            weight: scope.parameter("weight", spec(1.0)),
            bias: (kind == NormKind::Layer).then(|| scope.parameter("bias", spec(0.0))),
            epsilon,
        }
    }

    /// `[batch, seq, hidden]` to the same.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let weight = value_at(&self.weight, &x);
        let bias = self.bias.as_ref().map(|bias| value_at(bias, &x));
        let mut inputs = vec![x.into_dispatch(), weight.into_dispatch()];
        inputs.extend(bias.map(Tensor::into_dispatch));
        apply(
            inputs,
            Normalise {
                epsilon: self.epsilon,
            },
        )
    }
}

/// With three inputs (a bias) LayerNorm, with two RMSNorm.
#[derive(Debug)]
struct Normalise {
    epsilon: f64,
}

impl Function for Normalise {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let mut inputs = inputs.into_iter();
        let (Some(x), Some(weight), bias) = (inputs.next(), inputs.next(), inputs.next()) else {
            unreachable!("`Norm::forward` gives an input and a weight")
        };
        let (x, weight) = (
            Tensor::<3>::from_dispatch(x),
            Tensor::<1>::from_dispatch(weight),
        );
        let x = match bias {
            Some(_) => x.clone() - x.mean_dim(2),
            None => x,
        };
        let variance = (x.clone() * x.clone()).mean_dim(2);
        let scale = variance.add_scalar(self.epsilon).sqrt().recip();
        let normal = x * scale.clone();
        let mut y = normal.clone() * weight.clone().unsqueeze();
        if let Some(bias) = bias {
            y = y + Tensor::<1>::from_dispatch(bias).unsqueeze();
        }
        let saved = [normal, scale].map(Tensor::into_dispatch).into_iter();
        (
            y.into_dispatch(),
            saved.chain([weight.into_dispatch()]).collect(),
        )
    }

    /// With `n` the normalised input, `w` the weight and `d = g w`:
    /// `dx = (d - n mean(d n) [- mean(d)]) / sigma`, `dw = sum g n`, `db = sum g`.
    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let mut saved = saved.into_iter();
        let (Some(normal), Some(scale), Some(weight)) = (saved.next(), saved.next(), saved.next())
        else {
            unreachable!("the forward saves three tensors")
        };
        let (normal, scale) = (
            Tensor::<3>::from_dispatch(normal),
            Tensor::from_dispatch(scale),
        );
        let weight = Tensor::<1>::from_dispatch(weight);
        let gradient = Tensor::<3>::from_dispatch(gradient);
        let centred = needed.len() == 3;

        let input = needed[0].then(|| {
            let d = gradient.clone() * weight.unsqueeze();
            let along = (d.clone() * normal.clone()).mean_dim(2);
            let d = match centred {
                true => d.clone() - d.mean_dim(2),
                false => d,
            };
            ((d - normal.clone() * along) * scale).into_dispatch()
        });
        let mut gradients = vec![input];
        gradients.push(needed[1].then(|| over_tokens(gradient.clone() * normal)));
        if centred {
            gradients.push(needed[2].then(|| over_tokens(gradient)));
        }
        gradients
    }
}

/// `[batch, seq, hidden]` summed to `[hidden]`.
fn over_tokens(x: Tensor<3>) -> DispatchTensor {
    let [batch, seq, hidden] = x.dims();
    let sum: Tensor<2> = x.reshape([batch * seq, hidden]).sum_dim(0);
    sum.squeeze_dim::<1>(0).into_dispatch()
}
