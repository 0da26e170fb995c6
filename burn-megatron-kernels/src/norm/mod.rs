//! LayerNorm and RMSNorm over the last dimension, with an optional residual addition before the norm.
//!
//! In the formulas, `x` is a row of width `n`, `w` is the weight and `b` is the bias. With
//! [`zero_centered`](NormOptions::zero_centered), `1 + w` replaces `w`:
//!
//! - LayerNorm (Ba et al., 2016): `y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) w + b`
//! - RMSNorm (Zhang and Sennrich, 2019): `y = x / sqrt(mean(x^2) + epsilon) w`
//!
//! Statistics are computed in f32 (f64 for f64). The variance is computed as the mean of the squared deviations, not as
//! `mean(x^2) - mean(x)^2`. For the backward pass, the norm saves its input and 1 or 3 numbers per row. It does not
//! save the normalized values.
//!
//! The weight and the bias may have a different float type than `x`. The gradient of a parameter has the type of the
//! parameter. The bias is converted to the type of the weight.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};

use crate::cpu::wide;
use crate::error::accept;
use crate::function::apply_multi;
use crate::gradient::Parameter;
use crate::{KernelError, apply};

mod backward;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

pub use backward::StreamNormFunction;
use backward::{EachParameter, Norm, NormFormula, NormFunction, NormInputs};

/// The kind of normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// LayerNorm, with a weight and an optional bias.
    Layer,
    /// RMSNorm, with a weight and without a bias.
    Rms,
}

/// Options of the norms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormOptions {
    /// The number added to the variance (LayerNorm) or to the mean square (RMSNorm). It must be at least 0.
    pub epsilon: f64,
    /// Whether the normalized values are multiplied by `1 + w` instead of the weight `w`. Initialize the weight with 0
    /// in this case. Weight decay then pulls the factor `1 + w` towards 1.
    pub zero_centered: bool,
}

impl NormOptions {
    /// Creates options with the given epsilon and without zero-centered weights.
    pub fn new(epsilon: f64) -> Self {
        Self {
            epsilon,
            zero_centered: false,
        }
    }
}

/// Computes LayerNorm of `x`, `[.., n]`, with a weight `[n]` and a bias `[n]`.
///
/// # Panics
///
/// Panics with a [`KernelError`] if
/// - the sizes do not match, or the last dimension is empty,
/// - epsilon is negative or not finite,
/// - the device does not support a type.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    options: NormOptions,
) -> Tensor<D> {
    let bias = bias.map(Parameter::from);
    normalise(NormKind::Layer, x, weight.into(), bias, options)
}

/// Computes RMSNorm of `x`, `[.., n]`, with a weight `[n]`.
///
/// # Panics
///
/// Panics in the same cases as [`layer_norm`].
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_megatron_kernels::norm::{NormOptions, rms_norm};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::random([4, 8], Distribution::Default, &device).require_grad();
/// let weight = Tensor::<1>::ones([8], &device).require_grad();
/// let y = rms_norm(x.clone(), weight, NormOptions::new(1e-5));
/// let gradients = y.sum().backward();
/// assert_eq!(x.grad(&gradients).unwrap().dims(), [4, 8]);
/// ```
pub fn rms_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    options: NormOptions,
) -> Tensor<D> {
    normalise(NormKind::Rms, x, weight.into(), None, options)
}

/// Computes [`layer_norm`] or [`rms_norm`] with parameters whose gradients can be written to a flat buffer. If one
/// parameter has a destination, all parameters without a destination must be constants.
///
/// # Panics
///
/// Panics in the same cases as [`layer_norm`]. Also panics with a [`KernelError`] if RMSNorm has a bias. Also panics if
/// one parameter has a destination, but another parameter has no destination and is tracked by autodiff.
pub fn normalise<const D: usize>(
    kind: NormKind,
    x: Tensor<D>,
    weight: Parameter,
    bias: Option<Parameter>,
    options: NormOptions,
) -> Tensor<D> {
    let formula = match kind {
        NormKind::Layer => formula("layer_norm", true, options),
        NormKind::Rms => formula("rms_norm", false, options),
    };
    let parameters = GivenParameters {
        weight,
        bias,
        x_bias: None,
    };
    accept(parameters.check(formula, &x));
    let function = NormFunction(parameters.norm(formula, false));
    let inputs = [vec![x.into_dispatch()], parameters.into_values()].concat();
    apply(inputs, function)
}

/// Adds `x` and a bias to a residual stream and normalizes the sum. Returns `(norm(sum), sum)` with
/// `sum = (x + x_bias) + residual`.
///
/// The norm is computed as in [`normalise`]. `x_bias` is an optional bias `[n]` of `x`, of any float type. The residual
/// has the type of `x`. If `x` is f16 or bf16, the residual may be f32. The sum is computed in f32 and rounded once to
/// the type of the residual. The norm is computed from the rounded sum and has the type of `x`.
///
/// The sum is usually also an input of later operations. In the backward pass, one kernel computes the gradient of the
/// norm and adds the gradient from these operations. The result is the gradient of `x` and of the residual. The kernel
/// also sums the gradient of `x_bias`.
///
/// # Panics
///
/// Panics in the same cases as [`normalise`], and if the residual has a different shape or an unsupported type.
pub fn add_normalise<const D: usize>(
    kind: NormKind,
    x: Tensor<D>,
    x_bias: Option<Parameter>,
    residual: Tensor<D>,
    weight: Parameter,
    bias: Option<Parameter>,
    options: NormOptions,
) -> (Tensor<D>, Tensor<D>) {
    let stream = StreamNorm {
        x,
        residual: Some(residual),
        x_bias,
    };
    stream.normalise(kind, weight, bias, options)
}

/// A residual stream, and the value that is added to the residual stream before the norm. See [`add_normalise`].
#[derive(Clone, Debug)]
pub struct StreamNorm<const D: usize> {
    /// The value that is added to the residual stream. If `residual` is `None`, it is the residual stream after the
    /// addition.
    pub x: Tensor<D>,
    /// The residual stream before the addition.
    pub residual: Option<Tensor<D>>,
    /// The bias of `x`. If `residual` is `None`, `x` must already include this bias, and only the gradient of the bias
    /// is computed.
    pub x_bias: Option<Parameter>,
}

impl<const D: usize> StreamNorm<D> {
    /// Returns the norm and the sum. If `x` is already the sum, results and gradients are bitwise identical to the
    /// results and gradients of [`add_normalise`].
    ///
    /// # Panics
    ///
    /// Panics in the same cases as [`add_normalise`].
    pub fn normalise(
        self,
        kind: NormKind,
        weight: Parameter,
        bias: Option<Parameter>,
        options: NormOptions,
    ) -> (Tensor<D>, Tensor<D>) {
        // The weight and the bias do not affect the sum.
        let on_autodiff = self.is_autodiff();
        let (function, inputs) = self.into_function(kind, weight, bias, options);
        let [y, sum] = apply_multi(inputs, function);
        (y, if on_autodiff { sum } else { sum.inner() })
    }

    /// Returns whether the residual stream is on an autodiff device.
    pub fn is_autodiff(&self) -> bool {
        let terms = [Some(&self.x), self.residual.as_ref()];
        let mut terms = terms.into_iter().flatten();
        let of_bias = self.x_bias.as_ref();
        terms.any(|term| term.is_autodiff()) || of_bias.is_some_and(|bias| bias.value.is_autodiff())
    }

    /// Returns the norm as a [`MultiFunction`](crate::MultiFunction), for use in other functions, and the inputs of
    /// this function. The inputs are `x`, the residual, the weight, the bias and the bias of `x`. Inputs that are not
    /// present are omitted.
    ///
    /// # Panics
    ///
    /// Panics in the same cases as [`add_normalise`].
    pub fn into_function(
        self,
        kind: NormKind,
        weight: Parameter,
        bias: Option<Parameter>,
        options: NormOptions,
    ) -> (StreamNormFunction<D>, Vec<DispatchTensor>) {
        let formula = match kind {
            NormKind::Layer => formula("add_layer_norm", true, options),
            NormKind::Rms => formula("add_rms_norm", false, options),
        };
        let Self {
            x,
            residual,
            x_bias,
        } = self;
        let parameters = GivenParameters {
            weight,
            bias,
            x_bias,
        };
        accept(parameters.check(formula, &x));
        if let Some(residual) = &residual {
            accept(check_residual(formula.name, &x, residual));
        }
        let function = StreamNormFunction {
            norm: parameters.norm(formula, residual.is_some()),
            dtype: x.dtype(),
        };
        let terms = [Some(x), residual].into_iter().flatten();
        let terms = terms.map(Tensor::into_dispatch).collect();
        (function, [terms, parameters.into_values()].concat())
    }
}

fn formula(name: &'static str, centred: bool, options: NormOptions) -> NormFormula {
    NormFormula {
        name,
        centred,
        options,
    }
}

/// The parameters of a norm, and the bias of `x`.
struct GivenParameters {
    weight: Parameter,
    bias: Option<Parameter>,
    x_bias: Option<Parameter>,
}

impl GivenParameters {
    fn each(&self) -> EachParameter<Option<&Parameter>> {
        [Some(&self.weight), self.bias.as_ref(), self.x_bias.as_ref()]
    }

    fn norm(&self, formula: NormFormula, residual: bool) -> Norm {
        Norm {
            formula,
            inputs: NormInputs {
                residual,
                bias: self.bias.is_some(),
                x_bias: self.x_bias.as_ref().map(|bias| bias.value.dtype()),
            },
            destinations: self.each().map(|parameter| parameter?.destination.clone()),
        }
    }

    /// Returns the number of parameters whose gradients go to autodiff.
    fn tracked(&self) -> usize {
        let is_tracked = |parameter: &&Parameter| {
            let Parameter { value, destination } = parameter;
            destination.is_none() && value.is_autodiff() && value.is_tracked()
        };
        self.each().into_iter().flatten().filter(is_tracked).count()
    }

    /// Returns the tensors of the parameters. The bias is converted to the type of the weight.
    fn into_values(self) -> Vec<DispatchTensor> {
        let dtype = self.weight.value.dtype();
        let bias = self.bias.map(|bias| bias.value.cast::<DType>(dtype));
        let x_bias = self.x_bias.map(|bias| bias.value);
        let values = [Some(self.weight.value), bias, x_bias].into_iter();
        values.flatten().map(Tensor::into_dispatch).collect()
    }

    fn check<const D: usize>(
        &self,
        formula: NormFormula,
        x: &Tensor<D>,
    ) -> Result<(), KernelError> {
        let NormFormula { name, options, .. } = formula;
        let width = x.dims()[D - 1];
        if self.bias.is_some() && !formula.centred {
            return Err(KernelError::shape(name, "invalid bias: expected none"));
        }
        if width == 0 {
            let message = format!(
                "x {:?} has no elements in its last dim: expected 1 or more",
                x.dims()
            );
            return Err(KernelError::shape(name, message));
        }
        let names = ["weight", "bias", "bias of x"];
        for (what, parameter) in names.into_iter().zip(self.each()) {
            let dims = parameter.map(|parameter| parameter.value.dims());
            if let Some(dims) = dims.filter(|dims| *dims != [width]) {
                let message = format!(
                    "the {what} is {dims:?} and x is {:?}: expected a {what} [{width}]",
                    x.dims()
                );
                return Err(KernelError::shape(name, message));
            }
        }
        let refuse = |option, value, fits| Err(KernelError::option(name, option, value, fits));
        let given = self.each().into_iter().flatten();
        let with = given.filter(|parameter| parameter.destination.is_some());
        let (with, tracked) = (with.count(), self.tracked());
        if with > 0 && tracked > 0 {
            let value = format!("{with} for {} trained parameters", with + tracked);
            return refuse("destinations", value, "one for each of them, or none");
        }
        if !options.epsilon.is_finite() || options.epsilon < 0.0 {
            let value = options.epsilon.to_string();
            return refuse("epsilon", value, "a small positive number");
        }
        Ok(())
    }
}

fn check_residual<const D: usize>(
    operation: &'static str,
    x: &Tensor<D>,
    residual: &Tensor<D>,
) -> Result<(), KernelError> {
    if residual.dims() != x.dims() {
        let message = format!(
            "the residual is {:?} and x is {:?}: expected equal shapes",
            residual.dims(),
            x.dims()
        );
        return Err(KernelError::shape(operation, message));
    }
    let fits: [DType; 2] = [x.dtype(), wide(x.dtype())];
    if fits.contains(&residual.dtype()) {
        Ok(())
    } else {
        let value = format!("{:?} with x in {:?}", residual.dtype(), x.dtype());
        let fits = "the type of x, or F32 if x is F16 or BF16";
        Err(KernelError::option(
            operation,
            "type of the residual",
            value,
            fits,
        ))
    }
}
