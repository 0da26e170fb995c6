//! Input checks of several operations.

use burn::tensor::Tensor;

use super::delayed::LOG_COLUMNS;
use super::format::Format;
use crate::KernelError;
use crate::error::{F32, check_type};

/// Checks that the format has 8 bits.
pub(super) fn format(operation: &'static str, format: Format) -> Result<(), KernelError> {
    match format {
        Format::E4M3 | Format::E5M2 => Ok(()),
        Format::E2M1 => {
            let fits = "E4M3 or E5M2";
            Err(KernelError::option(operation, "format", "E2M1", fits))
        }
    }
}

/// Checks for a scalar `[1]` in f32.
pub(super) fn one(
    operation: &'static str,
    name: &'static str,
    tensor: &Tensor<1>,
) -> Result<(), KernelError> {
    match tensor.dims() {
        [1] => check_type(operation, name, tensor.dtype(), F32),
        [length] => Err(KernelError::shape(
            operation,
            format!("the {name} is [{length}]: expected [1]"),
        )),
    }
}

/// Checks for scales in f32 that have this one.
pub(super) fn element(
    operation: &'static str,
    scales: &Tensor<1>,
    index: usize,
) -> Result<(), KernelError> {
    let [length] = scales.dims();
    if index >= length {
        return Err(KernelError::shape(
            operation,
            format!("scale {index} of {length}: expected an index below {length}"),
        ));
    }
    check_type(operation, "scales", scales.dtype(), F32)
}

/// Checks for a log in f32 that has this entry.
pub(super) fn entry(
    operation: &'static str,
    log: &Tensor<1>,
    slot: usize,
) -> Result<(), KernelError> {
    let [length] = log.dims();
    if slot >= length / LOG_COLUMNS {
        return Err(KernelError::shape(
            operation,
            format!(
                "entry {slot} of a log of {length} numbers: expected at least {}",
                (slot + 1) * LOG_COLUMNS
            ),
        ));
    }
    check_type(operation, "log", log.dtype(), F32)
}

/// Checks that epsilon is finite and not negative.
pub(super) fn epsilon(operation: &'static str, epsilon: f32) -> Result<(), KernelError> {
    if epsilon.is_finite() && epsilon >= 0.0 {
        return Ok(());
    }
    let fits = "a finite number that is 0 or more";
    Err(KernelError::option(operation, "epsilon", epsilon, fits))
}
