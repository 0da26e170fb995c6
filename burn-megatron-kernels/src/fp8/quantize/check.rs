//! What the quantisers refuse.

use burn::tensor::{DType, Tensor};

use super::super::Format;
use super::CurrentScale;
use crate::KernelError;

/// Only formats of 8 bits.
pub(in super::super) fn format(operation: &'static str, format: Format) -> Result<(), KernelError> {
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

/// One number in f32.
pub(in super::super) fn one(
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
            value: format!("a number in {dtype:?}"),
            fits: "one in F32",
        }),
        _ => Err(KernelError::shape(
            operation,
            format!("the {name} is [{length}]; [1] fits"),
        )),
    }
}

/// A magnitude.
pub(super) fn epsilon(options: CurrentScale) -> Result<(), KernelError> {
    let epsilon = options.epsilon;
    match epsilon.is_finite() && epsilon >= 0.0 {
        true => Ok(()),
        false => Err(KernelError::Option {
            operation: "current_scale",
            name: "epsilon",
            value: format!("{epsilon}"),
            fits: "a finite number that is 0 or more",
        }),
    }
}
