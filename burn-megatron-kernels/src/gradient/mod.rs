//! Parameter gradients that the backward pass adds directly to a flat buffer instead of returning them to autodiff.
//!
//! A buffer holds the gradients of many parameters. An operation can take a [`Parameter`] whose gradient has a
//! [`GradientBuffer`] as its destination. The operation then computes the gradient in f32 (f64 for f64) and adds it to
//! the buffer. No separate tensor is needed for each gradient, and gradients are not rounded to the type of the
//! parameter.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};

use crate::KernelError;
use crate::cpu::wide;
use crate::error::{accept, check_option};
use crate::flat::check_range;

#[cfg(test)]
mod tests;

/// The place of one gradient in a flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The index of the first element of the gradient in the buffer.
    pub offset: usize,
    /// Whether the gradient is added to the existing elements. Otherwise it overwrites them.
    pub add: bool,
}

/// A flat buffer, and the places in the buffer to which an operation writes gradients.
#[derive(Debug)]
pub struct FlatGradients {
    /// The flat buffer, `[length]` in f32, f16 or bf16. For f64 operations, the buffer is f64.
    pub flat: Tensor<1>,
    /// The place of each gradient. Places must not overlap.
    pub places: Vec<Place>,
}

/// Storage for the gradients of parameters. Each parameter is identified by a number.
pub trait GradientBuffer: Send + Sync {
    /// Accumulates the gradients of several parameters. The backward pass of an operation calls this method. If the
    /// model uses a parameter several times, the gradients of all uses are added.
    ///
    /// The implementation must call `compute` exactly once. It may pass a flat buffer with a place for each gradient.
    /// In this case `compute` writes the gradients to the buffer and returns the buffer. Otherwise `compute` returns
    /// each gradient as a flat tensor.
    fn accumulate(&self, parameters: &[usize], compute: ComputeGradients<'_>);

    /// Accumulates the gradient of a weight, possibly after this method has returned. The implementation must call
    /// `compute` exactly once, but may call it later. The default implementation calls `compute` immediately.
    fn accumulate_later(&self, parameter: usize, compute: WeightGradientFn) {
        let mut compute = Some(compute);
        self.accumulate(&[parameter], &mut |target| match compute.take() {
            Some(compute) => vec![compute(target)],
            None => panic!("the gradient of parameter {parameter} was computed twice"),
        });
    }
}

/// A function that computes the gradient of a weight.
///
/// If the argument is a flat buffer with a place for the gradient, the function writes the gradient to the buffer and
/// returns the buffer. Otherwise it returns the gradient as a flat tensor.
pub type WeightGradientFn = Box<dyn FnOnce(Option<FlatGradients>) -> Tensor<1> + Send>;

/// A function that computes the gradients of several parameters. See [`GradientBuffer::accumulate`].
pub type ComputeGradients<'a> = &'a mut dyn FnMut(Option<FlatGradients>) -> Vec<Tensor<1>>;

/// A one-dimensional parameter of an operation, and the destination of its gradient: autodiff or a gradient buffer.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The value of the parameter, `[n]`. If there is a destination, autodiff does not track the value.
    pub value: Tensor<1>,
    /// The destination of the gradient. With `None`, autodiff receives the gradient.
    pub destination: Option<Destination>,
}

impl Parameter {
    /// Splits an optional parameter into its value and the destination of its gradient.
    pub(crate) fn into_parts(parameter: Option<Self>) -> (Option<Tensor<1>>, Option<Destination>) {
        match parameter {
            Some(Self { value, destination }) => (Some(value), destination),
            None => (None, None),
        }
    }
}

/// The destination of the gradient of a parameter in a [`GradientBuffer`].
#[derive(Clone)]
pub struct Destination {
    /// The number that identifies the parameter in the buffer.
    pub parameter: usize,
    /// The gradient buffer. All parameters of an operation must have the same buffer.
    pub buffer: Arc<dyn GradientBuffer>,
}

impl Destination {
    /// Accumulates the gradient of the parameter, possibly after this method has returned. See
    /// [`GradientBuffer::accumulate_later`].
    pub fn accumulate_later(
        &self,
        compute: impl FnOnce(Option<FlatGradients>) -> Tensor<1> + Send + 'static,
    ) {
        self.buffer
            .accumulate_later(self.parameter, Box::new(compute));
    }
}

impl From<Tensor<1>> for Parameter {
    fn from(value: Tensor<1>) -> Self {
        let destination = None;
        Self { value, destination }
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "parameter {}", self.parameter)
    }
}

/// Accumulates the gradients of several parameters in their common gradient buffer.
///
/// `compute` returns an additional result and the gradients. Its argument is an optional flat buffer with a place for
/// each gradient, as in [`GradientBuffer::accumulate`]. `accumulate` returns the additional result.
///
/// # Panics
///
/// Panics if the gradient buffer does not call `compute` exactly once.
pub fn accumulate<R>(
    destinations: &[&Destination],
    compute: impl FnOnce(Option<FlatGradients>) -> (R, Vec<Tensor<1>>),
) -> R {
    let parameters: Vec<_> = destinations.iter().map(|to| to.parameter).collect();
    let (mut compute, mut result) = (Some(compute), None);
    destinations[0]
        .buffer
        .accumulate(&parameters, &mut |flat| match compute.take() {
            Some(compute) => {
                let (other, gradients) = compute(flat);
                result = Some(other);
                gradients
            }
            None => panic!("the gradients of parameters {parameters:?} were computed twice"),
        });
    match result {
        Some(result) => result,
        None => panic!("the gradients of parameters {parameters:?} were not computed"),
    }
}

/// Checks a flat buffer that receives gradients of `length` elements each. The gradients are sums of values of type
/// `dtype`.
pub(crate) fn check(
    operation: &'static str,
    target: &FlatGradients,
    length: usize,
    dtype: DType,
) -> Result<(), KernelError> {
    for place in &target.places {
        check_range(operation, &target.flat, place.offset, &[length])?;
    }
    let flat = target.flat.dtype();
    let is_valid = flat.is_float() && wide(flat) == wide(dtype);
    let (name, value) = (
        "type of the flat buffer",
        format_args!("{flat:?} with values in {dtype:?}"),
    );
    let fits = "F32, F16 or BF16, and F64 for F64";
    check_option(operation, is_valid, name, value, fits)
}

/// Returns the flat buffer of `target` as the input of a kernel, and the places of the gradients. Each gradient has
/// `length` elements.
pub(crate) fn split(
    operation: &'static str,
    target: Option<FlatGradients>,
    length: usize,
    dtype: DType,
) -> (Option<DispatchTensor>, Option<Vec<Place>>) {
    let Some(target) = target else {
        return (None, None);
    };
    accept(check(operation, &target, length, dtype));
    (Some(target.flat.into_dispatch()), Some(target.places))
}
