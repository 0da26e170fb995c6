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

use burn::tensor::{DType, Tensor};

use crate::cpu::wide;
use crate::error::accept;
use crate::function::apply_multi;
use crate::{KernelError, apply};

mod backward;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

use backward::{AddNormFunction, NormFormula, NormFunction};

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
    normalise(formula("layer_norm", true, options), x, weight, bias)
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
    normalise(formula("rms_norm", false, options), x, weight, None)
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
    let formula = formula("add_layer_norm", true, options);
    add_normalise(formula, x, residual, weight, bias)
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
    let formula = formula("add_rms_norm", false, options);
    add_normalise(formula, x, residual, weight, None)
}

fn formula(name: &'static str, centred: bool, options: NormOptions) -> NormFormula {
    NormFormula {
        name,
        centred,
        options,
    }
}

fn normalise<const D: usize>(
    formula: NormFormula,
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    accept(check(formula, &x, &weight, bias.as_ref()));
    let bias = bias.map(|bias| bias.cast(weight.dtype()).into_dispatch());
    let mut inputs = vec![x.into_dispatch(), weight.into_dispatch()];
    inputs.extend(bias);
    apply(inputs, NormFunction(formula))
}

fn add_normalise<const D: usize>(
    formula: NormFormula,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> (Tensor<D>, Tensor<D>) {
    accept(check(formula, &x, &weight, bias.as_ref()));
    accept(check_residual(formula.name, &x, &residual));
    let bias = bias.map(|bias| bias.cast(weight.dtype()).into_dispatch());
    let on_autodiff = x.is_autodiff() || residual.is_autodiff();
    let function = AddNormFunction::<D> {
        formula,
        dtype: x.dtype(),
    };
    let mut inputs = vec![
        x.into_dispatch(),
        residual.into_dispatch(),
        weight.into_dispatch(),
    ];
    inputs.extend(bias);
    let [y, sum] = apply_multi(inputs, function);
    // The parameters have no part in the sum.
    (y, if on_autodiff { sum } else { sum.inner() })
}

fn check<const D: usize>(
    formula: NormFormula,
    x: &Tensor<D>,
    weight: &Tensor<1>,
    bias: Option<&Tensor<1>>,
) -> Result<(), KernelError> {
    let NormFormula { name, options, .. } = formula;
    let width = x.dims()[D - 1];
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
