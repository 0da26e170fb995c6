//! Parameter gradients that a backward adds directly to a flat buffer instead of returning them.
//!
//! A buffer holds the gradients of many parameters. An operation with a [`Parameter`] that has a
//! [`GradientBuffer`] computes its gradient sums in f32 (f64 for f64) and adds them to the buffer.
//! The gradients need no separate tensors and are not rounded to the type of the parameter.

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
    /// The index of the first element.
    pub offset: usize,
    /// Whether to add to the elements. Otherwise they are overwritten.
    pub add: bool,
}

/// A flat buffer, and the places of some gradients in it.
#[derive(Debug)]
pub struct FlatGradients {
    /// The buffer, `[length]` in f32, f16 or bf16, or in f64 for operations in f64.
    pub flat: Tensor<1>,
    /// The place of each gradient. Places do not overlap.
    pub places: Vec<Place>,
}

/// A store for the gradients of parameters, which are identified by numbers.
pub trait GradientBuffer: Send + Sync {
    /// Accumulates gradients of these parameters, one use of each parameter.
    ///
    /// `compute` must be called exactly once. If it gets the places of the gradients in one flat
    /// buffer, it returns that buffer with the gradients in it. Otherwise it returns the gradients
    /// as flat tensors.
    fn accumulate(&self, parameters: &[usize], compute: ComputeGradients<'_>);

    /// Accumulates the gradient of one use of a weight, which may be computed later. `compute` must
    /// be called exactly once. By default it is called immediately.
    fn accumulate_later(&self, parameter: usize, compute: WeightGradientFn) {
        let mut compute = Some(compute);
        self.accumulate(&[parameter], &mut |target| match compute.take() {
            Some(compute) => vec![compute(target)],
            None => panic!("the gradient of parameter {parameter} was computed twice"),
        });
    }
}

/// A function that computes a weight gradient.
///
/// If it gets the place of the gradient in a flat buffer, it returns that buffer with the gradient
/// in it. Otherwise it returns the gradient as a flat tensor.
pub type WeightGradientFn = Box<dyn FnOnce(Option<FlatGradients>) -> Tensor<1> + Send>;

/// A function that computes gradients; see [`GradientBuffer::accumulate`].
pub type ComputeGradients<'a> = &'a mut dyn FnMut(Option<FlatGradients>) -> Vec<Tensor<1>>;

/// A vector that an operation reads, and the destination of its gradient: the graph or a buffer.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The value, `[n]`. It is not tracked if there is a destination.
    pub value: Tensor<1>,
    /// The destination of the gradient. `None`: the graph.
    pub destination: Option<Destination>,
}

impl Parameter {
    /// Splits an optional parameter into its value and its destination.
    pub(crate) fn into_parts(parameter: Option<Self>) -> (Option<Tensor<1>>, Option<Destination>) {
        match parameter {
            Some(Self { value, destination }) => (Some(value), destination),
            None => (None, None),
        }
    }
}

/// A parameter of a [`GradientBuffer`].
#[derive(Clone)]
pub struct Destination {
    /// The number of the parameter.
    pub parameter: usize,
    /// The buffer. All parameters of an operation have the same buffer.
    pub buffer: Arc<dyn GradientBuffer>,
}

impl Destination {
    /// Accumulates a gradient; see [`GradientBuffer::accumulate_later`].
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

/// Accumulates the gradients of these parameters in their buffer. `compute` returns another result together with the
/// gradients. The function returns this result.
///
/// # Panics
///
/// Panics if the buffer does not call `compute` exactly once.
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

/// Checks a flat buffer for sums of `length` elements each, of values of type `dtype`.
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

/// Returns the inputs of a kernel that writes sums of `length` elements to `target`, and the places
/// of the sums.
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
