//! Input checks that several FP8 operations share.

use burn::tensor::Tensor;

use super::delayed::LOG_COLUMNS;
use super::format::Format;
use crate::KernelError;
use crate::error::{F32, check_option, check_shape, check_type};

/// Checks that the format has 8 bits.
pub(super) fn format(operation: &'static str, format: Format) -> Result<(), KernelError> {
    let fits = format != Format::E2M1;
    check_option(operation, fits, "format", "E2M1", "E4M3 or E5M2")
}

/// Checks that a tensor is a scalar `[1]` in f32.
pub(super) fn one(
    operation: &'static str,
    name: &'static str,
    tensor: &Tensor<1>,
) -> Result<(), KernelError> {
    let [length] = tensor.dims();
    check_shape(operation, length == 1, || {
        format!("the {name} is [{length}]: expected [1]")
    })?;
    check_type(operation, name, tensor.dtype(), F32)
}

/// Checks that scales are in f32 and have an element `index`.
pub(super) fn element(
    operation: &'static str,
    scales: &Tensor<1>,
    index: usize,
) -> Result<(), KernelError> {
    let [length] = scales.dims();
    check_shape(operation, index < length, || {
        format!("scale {index} of {length}: expected an index below {length}")
    })?;
    check_type(operation, "scales", scales.dtype(), F32)
}

/// Checks that a log of magnitudes is in f32 and has an entry for `slot`.
pub(super) fn entry(
    operation: &'static str,
    log: &Tensor<1>,
    slot: usize,
) -> Result<(), KernelError> {
    let [length] = log.dims();
    check_shape(operation, slot < length / LOG_COLUMNS, || {
        let least = (slot + 1) * LOG_COLUMNS;
        format!("entry {slot} of a log of {length} numbers: expected at least {least}")
    })?;
    check_type(operation, "log", log.dtype(), F32)
}

/// Checks that epsilon is finite and not negative.
pub(super) fn epsilon(operation: &'static str, epsilon: f32) -> Result<(), KernelError> {
    let fits = epsilon.is_finite() && epsilon >= 0.0;
    let expected = "a finite number that is 0 or more";
    check_option(operation, fits, "epsilon", epsilon, expected)
}
