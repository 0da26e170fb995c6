//! Input checks of several operations.

use burn::tensor::{DType, Tensor};

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
    let [length] = tensor.dims();
    match (length, tensor.dtype()) {
        (1, DType::F32) => Ok(()),
        (1, dtype) => Err(KernelError::Option {
            operation,
            name,
            value: format!("{dtype:?}"),
            fits: "F32",
        }),
        _ => Err(KernelError::shape(
            operation,
            format!("the {name} is [{length}]: expected [1]"),
        )),
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
