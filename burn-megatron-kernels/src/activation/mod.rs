//! Fused activations of an MLP. One kernel adds the bias, computes the activation function and the gate, and multiplies
//! by the row weight.
//!
//! [`activate`] reads its input once and writes its output once. It saves only its inputs and recomputes the activation
//! function in the backward pass. [`composed::activate`] computes the same function with Burn's own operations.

use burn::tensor::{DType, Tensor};

use crate::error::{KernelError, accept};
use crate::function::apply;
use crate::gradient::Parameter;

mod backward;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
pub(crate) mod kind;
#[cfg(test)]
mod tests;

pub use backward::ActivationFunction;
pub(crate) use kind::FusedActivation;
pub use kind::{Activation, ActivationOptions};

const NAME: &str = "activate";

/// Computes `f(x + bias) * row_weight`, where `f` is the activation function. The forward pass and the backward pass
/// use one kernel each.
///
/// - `x`: `[.., width]`. The leading dimensions form the rows.
/// - `bias`: `[width]`, converted to the type of `x`.
/// - `row_weight`: `[rows]`, one factor per output row, such as the router weights of a mixture of experts. It is f32
///   (f64 if `x` is f64).
/// - returns `[.., width]`, or `[.., width / 2]` for a gated `kind`, in the type of `x`.
///
/// All intermediate values are f32 (f64 for f64) and the result is rounded once at the end. For large finite inputs,
/// the result is the limit of the formula. For NaN, the result is NaN. The result for an infinite input is not
/// specified. The backward pass uses `x`, `bias` and `row_weight` and recomputes all other values.
///
/// # Panics
///
/// Panics with a [`KernelError`] if
/// - the shapes do not match,
/// - the clamp limit is not positive and finite, or the offset is not finite,
/// - a clamp limit or an offset is given for a `kind` without a gate.
pub fn activate<const D: usize>(
    x: Tensor<D>,
    bias: Option<Tensor<1>>,
    row_weight: Option<Tensor<1>>,
    kind: Activation,
    options: ActivationOptions,
) -> Tensor<D> {
    activate_with(x, bias.map(Parameter::from), row_weight, kind, options)
}

/// Computes [`activate`] with a bias whose gradient can be written to a flat buffer.
pub fn activate_with<const D: usize>(
    x: Tensor<D>,
    bias: Option<Parameter>,
    row_weight: Option<Tensor<1>>,
    kind: Activation,
    options: ActivationOptions,
) -> Tensor<D> {
    let (bias, destination) = Parameter::into_parts(bias);
    let bias_width = bias.as_ref().map(|bias| bias.dims()[0]);
    let weights = row_weight.as_ref().map(|weight| weight.dims()[0]);
    accept(check(&x.dims(), bias_width, weights, kind, options));
    let fused = FusedActivation {
        kind,
        options,
        bias: bias.is_some(),
        weight: row_weight.is_some(),
    };
    let function = ActivationFunction { fused, destination };
    let dtype = x.dtype();
    let bias = bias.map(|bias| typed(bias, dtype).into_dispatch());
    let weight = row_weight.map(|weight| typed(weight, statistics(dtype)).into_dispatch());
    let inputs = [Some(x.into_dispatch()), bias, weight];
    apply(inputs.into_iter().flatten().collect(), function)
}

fn typed(tensor: Tensor<1>, dtype: DType) -> Tensor<1> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        tensor.cast(dtype)
    }
}

/// Returns the type in which values of `dtype` are computed.
fn statistics(dtype: DType) -> DType {
    crate::cpu::wide(dtype)
}

/// Checks the input of an activation without options.
pub(crate) fn check_activation(
    shape: &[usize],
    bias: Option<usize>,
    kind: Activation,
) -> Result<(), KernelError> {
    check(shape, bias, None, kind, ActivationOptions::default())
}

fn check(
    shape: &[usize],
    bias: Option<usize>,
    weights: Option<usize>,
    kind: Activation,
    options: ActivationOptions,
) -> Result<(), KernelError> {
    check_options(kind, options)?;
    let Some((width, leading)) = shape.split_last() else {
        return Err(KernelError::shape(
            NAME,
            "a tensor without dims has no width",
        ));
    };
    if kind.is_gated() && !width.is_multiple_of(2) {
        let message = format!(
            "{kind:?} takes two halves of the last dim, but {shape:?} has an odd width of {width}: expected \
             an even one"
        );
        return Err(KernelError::shape(NAME, message));
    }
    if let Some(length) = bias.filter(|length| length != width) {
        let message = format!("a bias [{length}] for x {shape:?}: expected [{width}]");
        return Err(KernelError::shape(NAME, message));
    }
    // The check of the tensor's size rejects a number of elements that overflows.
    let rows = leading
        .iter()
        .fold(1usize, |rows, dim| rows.saturating_mul(*dim));
    if let Some(length) = weights.filter(|length| *length != rows) {
        let message = format!("row weights [{length}] for x {shape:?}: expected [{rows}]");
        return Err(KernelError::shape(NAME, message));
    }
    Ok(())
}

fn check_options(kind: Activation, options: ActivationOptions) -> Result<(), KernelError> {
    let error = |name, value: String, fits| KernelError::option(NAME, name, value, fits);
    if let Some(clamp) = options.clamp {
        if !kind.is_gated() {
            let value = format!("{clamp} for {kind:?}");
            return Err(error("clamp", value, "no clamp, or a gated activation"));
        }
        // The kernels compute in f32. A clamp limit outside of this range would be infinite or zero in f32.
        if !((clamp as f32).is_finite() && clamp as f32 > 0.0) {
            return Err(error("clamp", clamp.to_string(), "a positive finite f32"));
        }
    }
    if options.offset != 0.0 && !kind.is_gated() {
        let value = format!("{} for {kind:?}", options.offset);
        return Err(error("offset", value, "0, or a gated activation"));
    }
    if !(options.offset as f32).is_finite() {
        return Err(error("offset", options.offset.to_string(), "a finite f32"));
    }
    Ok(())
}
