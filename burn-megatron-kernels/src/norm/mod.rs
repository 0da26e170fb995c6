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

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use crate::cpu::wide;
use crate::error::accept;
use crate::{KernelError, apply};

mod backward;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

use backward::{Add, Carry, Later, Link, Norm, Rule};

/// What the norms have in common beside their parameters.
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
/// not finite, and a type that the device lacks.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    options: NormOptions,
) -> Tensor<D> {
    normalise(rule("layer_norm", true, options), x, weight, bias)
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
    normalise(rule("rms_norm", false, options), x, weight, None)
}

/// `(layer_norm(sum), sum)` with `sum = x + residual`, in one pass.
///
/// The residual may be wider than `x`: of the type of `x`, or f32 (f64 beside f64). The sum is
/// computed in f32 and has the residual's type, the norm that of `x`. The norm is that of the
/// rounded sum. In the backward the gradient that the sum's other users give is added by the kernel
/// of the norm's gradient.
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
    let rule = rule("add_layer_norm", true, options);
    add_normalise(rule, x, residual, weight, bias)
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
    let rule = rule("add_rms_norm", false, options);
    add_normalise(rule, x, residual, weight, None)
}

fn rule(name: &'static str, centred: bool, options: NormOptions) -> Rule {
    Rule {
        name,
        centred,
        options,
    }
}

fn normalise<const D: usize>(
    rule: Rule,
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    accept(check(rule, &x, &weight, bias.as_ref()));
    let bias = bias.map(|bias| bias.cast(weight.dtype()).into_dispatch());
    let mut inputs = vec![x.into_dispatch(), weight.into_dispatch()];
    inputs.extend(bias);
    apply(inputs, Norm { rule, link: None })
}

/// Two nodes that share one launch: that of the sum makes the norm's output too and leaves it in
/// the link, where the node of the norm finds it.
fn add_normalise<const D: usize>(
    rule: Rule,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> (Tensor<D>, Tensor<D>) {
    accept(check(rule, &x, &weight, bias.as_ref()));
    accept(check_residual(rule.name, &x, &residual));
    let bias = bias.map(|bias| bias.cast(weight.dtype()));
    let plain = |tensor: &Tensor<1>| tensor.clone().inner().into_dispatch();
    let params: Vec<_> = [Some(&weight), bias.as_ref()]
        .into_iter()
        .flatten()
        .collect();
    let carried = x.is_autodiff() || residual.is_autodiff();
    if !carried && params.iter().all(|param| !param.is_autodiff()) {
        let mut inputs = vec![x.into_dispatch(), residual.into_dispatch()];
        inputs.extend(params.into_iter().map(plain));
        let (y, sum, _) = backward::add(rule, inputs);
        return (Tensor::from_dispatch(y), Tensor::from_dispatch(sum));
    }
    let link = Arc::<Link>::default();
    let add = Add::<D> {
        rule,
        dtype: x.dtype(),
        params: params.into_iter().map(plain).collect(),
        link: link.clone(),
    };
    let sum: Tensor<D> = apply(vec![x.into_dispatch(), residual.into_dispatch()], add);
    let mut inputs = vec![sum.clone().into_dispatch(), weight.into_dispatch()];
    inputs.extend(bias.map(Tensor::into_dispatch));
    let norm = Norm {
        rule,
        link: Some(link.clone()),
    };
    let y = apply(inputs, norm);
    if !carried {
        return (y, sum);
    }
    let later: Tensor<D> = apply(vec![sum.clone().into_dispatch()], Later);
    let both = vec![sum.into_dispatch(), later.into_dispatch()];
    (y, apply(both, Carry { link }))
}

fn check<const D: usize>(
    rule: Rule,
    x: &Tensor<D>,
    weight: &Tensor<1>,
    bias: Option<&Tensor<1>>,
) -> Result<(), KernelError> {
    let Rule { name, options, .. } = rule;
    let width = x.dims()[D - 1];
    if width == 0 {
        let message = format!(
            "x {:?} has no elements in its last dim; 1 or more fit",
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
                "the {what} is {dims:?} and x is {:?}; a {what} [{width}] fits",
                x.dims()
            );
            return Err(KernelError::shape(name, message));
        }
    }
    match options.epsilon.is_finite() && options.epsilon >= 0.0 {
        true => Ok(()),
        false => Err(KernelError::Option {
            operation: name,
            name: "epsilon",
            value: options.epsilon.to_string(),
            fits: "a small positive number",
        }),
    }
}

fn check_residual<const D: usize>(
    operation: &'static str,
    x: &Tensor<D>,
    residual: &Tensor<D>,
) -> Result<(), KernelError> {
    if residual.dims() != x.dims() {
        let message = format!(
            "the residual is {:?} and x is {:?}; both must be equal",
            residual.dims(),
            x.dims()
        );
        return Err(KernelError::shape(operation, message));
    }
    let fits: [DType; 2] = [x.dtype(), wide(x.dtype())];
    match fits.contains(&residual.dtype()) {
        true => Ok(()),
        false => Err(KernelError::Option {
            operation,
            name: "the type of the residual",
            value: format!("{:?} beside {:?}", residual.dtype(), x.dtype()),
            fits: "the type of x, or F32 beside F16 and BF16,",
        }),
    }
}
