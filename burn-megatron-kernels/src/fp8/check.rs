//! Input checks of several operations.

use burn::tensor::{DType, Tensor};

use super::delayed::LOG_COLUMNS;
use super::format::Format;
use crate::KernelError;

/// Checks that the format has 8 bits.
pub(super) fn format(operation: &'static str, format: Format) -> Result<(), KernelError> {
    match format {
        Format::E4M3 | Format::E5M2 => Ok(()),
        Format::E2M1 => Err(KernelError::Option {
            operation,
            name: "format",
            value: "E2M1".into(),
            fits: "E4M3 or E5M2",
        }),
    }
}

/// Checks for a scalar `[1]` in f32.
pub(super) fn one(
    operation: &'static str,
    name: &'static str,
    tensor: &Tensor<1>,
) -> Result<(), KernelError> {
    match tensor.dims() {
        [1] => f32s(operation, name, tensor),
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
    f32s(operation, "scales", scales)
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
    f32s(operation, "log", log)
}

/// Checks for a tensor in f32.
pub(super) fn f32s(
    operation: &'static str,
    name: &'static str,
    tensor: &Tensor<1>,
) -> Result<(), KernelError> {
    match tensor.dtype() {
        DType::F32 => Ok(()),
        dtype => Err(KernelError::Option {
            operation,
            name,
            value: format!("{dtype:?}"),
            fits: "F32",
        }),
    }
}

/// Checks that epsilon is finite and not negative.
pub(super) fn epsilon(epsilon: f32) -> Result<(), KernelError> {
    if epsilon.is_finite() && epsilon >= 0.0 {
        Ok(())
    } else {
        Err(KernelError::Option {
            operation: "current_scale",
            name: "epsilon",
            value: format!("{epsilon}"),
            fits: "a finite number that is 0 or more",
        })
    }
}
