//! LayerNorm and RMSNorm over the last dim, alone or with the residual addition before them.
//!
//! With `n` the width of a row `x`, `w` the weight (`1 + w` if
//! [`zero_centered`](NormOptions::zero_centered)) and `b` the bias:
//!
//! - LayerNorm (Ba et al., 2016): `y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) w + b`
//! - RMSNorm (Zhang and Sennrich, 2019): `y = x / sqrt(mean(x^2) + epsilon) w`
//!
//! Statistics are computed in f32 (in f64 for f64), the variance from the deviations and never as a
//! difference of squares. The backward keeps the input and 1 or 3 numbers of each row, not the
//! normalised values.
//!
//! The weight and the bias may be of another float type than `x`; their gradients come in their own
//! type. The bias is taken in the weight's type.

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

use backward::{AddNormFunction, NormDestinations, NormFormula, NormFunction};

/// The kind of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// LayerNorm.
    Layer,
    /// RMSNorm, which has no bias.
    Rms,
}

/// Options of the norms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormOptions {
    /// Added to the variance, or to the mean square: a positive number, 0 included.
    pub epsilon: f64,
    /// Whether the weight is used as `1 + w`, so that it starts at 0 and decays towards 1.
    pub zero_centered: bool,
}

impl NormOptions {
    /// A weight that is used as it is.
    pub fn new(epsilon: f64) -> Self {
        Self {
            epsilon,
            zero_centered: false,
        }
    }
}

/// LayerNorm of `x` `[.., n]` with a weight and a bias `[n]`.
///
/// # Panics
///
/// With a [`KernelError`] for sizes that differ, an empty last dim, an epsilon that is negative or
/// not finite, and a type that the device does not support.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    options: NormOptions,
) -> Tensor<D> {
    let bias = bias.map(Parameter::from);
    normalise(NormKind::Layer, x, weight.into(), bias, options)
}

/// RMSNorm of `x` `[.., n]` with a weight `[n]`.
///
/// # Panics
///
/// As [`layer_norm`].
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

/// `(layer_norm(sum), sum)` with `sum = x + residual`, in one pass.
///
/// The residual may be wider than `x`: of the type of `x`, or f32 (f64 beside f64). The sum is
/// computed in f32 and has the residual's type, the norm that of `x`. The norm is that of the
/// rounded sum. In the backward, the gradient from the other users of the sum is added by the
/// kernel of the norm's gradient.
///
/// # Panics
///
/// As [`layer_norm`], and for a residual of another shape or type.
pub fn add_layer_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    options: NormOptions,
) -> (Tensor<D>, Tensor<D>) {
    let bias = bias.map(Parameter::from);
    add_normalise(NormKind::Layer, x, residual, weight.into(), bias, options)
}

/// `(rms_norm(sum), sum)` with `sum = x + residual`, in one pass; see [`add_layer_norm`].
///
/// # Panics
///
/// As [`add_layer_norm`].
pub fn add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    options: NormOptions,
) -> (Tensor<D>, Tensor<D>) {
    add_normalise(NormKind::Rms, x, residual, weight.into(), None, options)
}

/// [`layer_norm`] or [`rms_norm`] with parameters whose gradients may go to a flat buffer, both or
/// none.
///
/// # Panics
///
/// As [`layer_norm`], and with a [`KernelError`] for a bias beside RMSNorm.
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
    let (parameters, destinations) = accept(parameters(formula, &x, weight, bias));
    let inputs = [vec![x.into_dispatch()], parameters].concat();
    let function = NormFunction {
        formula,
        destinations,
    };
    apply(inputs, function)
}

/// [`add_layer_norm`] or [`add_rms_norm`] with parameters as in [`normalise`].
///
/// # Panics
///
/// As [`add_layer_norm`], and with a [`KernelError`] for a bias beside RMSNorm.
pub fn add_normalise<const D: usize>(
    kind: NormKind,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Parameter,
    bias: Option<Parameter>,
    options: NormOptions,
) -> (Tensor<D>, Tensor<D>) {
    let formula = match kind {
        NormKind::Layer => formula("add_layer_norm", true, options),
        NormKind::Rms => formula("add_rms_norm", false, options),
    };
    let (parameters, destinations) = accept(parameters(formula, &x, weight, bias));
    accept(check_residual(formula.name, &x, &residual));
    let on_autodiff = x.is_autodiff() || residual.is_autodiff();
    let function = AddNormFunction::<D> {
        formula,
        dtype: x.dtype(),
        destinations,
    };
    let inputs = vec![x.into_dispatch(), residual.into_dispatch()];
    let inputs = [inputs, parameters].concat();
    let [y, sum] = apply_multi(inputs, function);
    // The parameters have no part in the sum.
    (y, if on_autodiff { sum } else { sum.inner() })
}

fn formula(name: &'static str, centred: bool, options: NormOptions) -> NormFormula {
    NormFormula {
        name,
        centred,
        options,
    }
}

/// The values of the parameters, in the type of the weight, and where their gradients go.
fn parameters<const D: usize>(
    formula: NormFormula,
    x: &Tensor<D>,
    weight: Parameter,
    bias: Option<Parameter>,
) -> Result<(Vec<DispatchTensor>, NormDestinations), KernelError> {
    let of_bias = bias.as_ref().map(|bias| &bias.value);
    check(formula, x, &weight.value, of_bias)?;
    let dtype = weight.value.dtype();
    let mut values = vec![weight.value.into_dispatch()];
    let mut destinations = [weight.destination, None];
    if let Some(bias) = bias {
        values.push(bias.value.cast::<DType>(dtype).into_dispatch());
        destinations[1] = bias.destination;
        let [of_weight, of_bias] = destinations.each_ref().map(Option::is_some);
        if of_weight != of_bias {
            return Err(KernelError::Option {
                operation: formula.name,
                name: "destination",
                value: "of one parameter".into(),
                fits: "destinations of the weight and the bias, or none",
            });
        }
    }
    Ok((values, destinations))
}

fn check<const D: usize>(
    formula: NormFormula,
    x: &Tensor<D>,
    weight: &Tensor<1>,
    bias: Option<&Tensor<1>>,
) -> Result<(), KernelError> {
    let NormFormula { name, options, .. } = formula;
    let width = x.dims()[D - 1];
    if bias.is_some() && !formula.centred {
        return Err(KernelError::shape(name, "a bias: expected none"));
    }
    if width == 0 {
        let message = format!(
            "x {:?} has no elements in its last dim: expected 1 or more",
            x.dims()
        );
        return Err(KernelError::shape(name, message));
    }
    for (what, tensor) in [("weight", Some(weight)), ("bias", bias)] {
        if let Some(dims) = tensor
            .map(|tensor| tensor.dims())
            .filter(|dims| *dims != [width])
        {
            let message = format!(
                "the {what} is {dims:?} and x is {:?}: expected a {what} [{width}]",
                x.dims()
            );
            return Err(KernelError::shape(name, message));
        }
    }
    if options.epsilon.is_finite() && options.epsilon >= 0.0 {
        Ok(())
    } else {
        Err(KernelError::Option {
            operation: name,
            name: "epsilon",
            value: options.epsilon.to_string(),
            fits: "a small positive number",
        })
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
        Err(KernelError::Option {
            operation,
            name: "type of the residual",
            value: format!("{:?} beside {:?}", residual.dtype(), x.dtype()),
            fits: "the type of x, or F32 beside F16 and BF16",
        })
    }
}
