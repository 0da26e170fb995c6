//! The error type of the fused operations.

use std::fmt::Debug;

use burn::tensor::DType;

use crate::cpu::wide;

/// The error of a fused operation. All backends report the same errors.
///
/// Like Burn's own operations, public functions panic with the message of this error. They panic before they allocate
/// memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The shapes of the inputs do not match.
    #[error("{operation}: {message}")]
    Shape {
        /// The name of the operation.
        operation: &'static str,
        /// The actual and the expected shapes.
        message: String,
    },
    /// The operation or the device does not support the element type.
    #[error("{operation} does not support {dtype:?} on {device}: expected {fits}")]
    Type {
        /// The name of the operation.
        operation: &'static str,
        /// The element type that was given.
        dtype: DType,
        /// A description of the device.
        device: String,
        /// The supported element types.
        fits: String,
    },
    /// An option is out of range.
    #[error("{operation}: invalid {name} = {value}: expected {fits}")]
    Option {
        /// The name of the operation.
        operation: &'static str,
        /// The name of the option.
        name: &'static str,
        /// The value of the option.
        value: String,
        /// The expected values.
        fits: &'static str,
    },
    /// A tensor has more than [`MAX_ELEMENTS`] elements.
    #[error("{operation}: tensor {shape:?} has too many elements: expected at most {MAX_ELEMENTS}")]
    TooLarge {
        /// The name of the operation.
        operation: &'static str,
        /// The shape that was given.
        shape: Vec<usize>,
    },
}

/// The maximum number of elements of a tensor. Kernels use 32-bit indices.
pub const MAX_ELEMENTS: usize = u32::MAX as usize;

impl KernelError {
    /// Creates an error for shapes that do not match.
    pub(crate) fn shape(operation: &'static str, message: impl Into<String>) -> Self {
        Self::Shape {
            operation,
            message: message.into(),
        }
    }

    /// Creates an error for an option that is out of range.
    pub(crate) fn option(
        operation: &'static str,
        name: &'static str,
        value: impl ToString,
        fits: &'static str,
    ) -> Self {
        Self::Option {
            operation,
            name,
            value: value.to_string(),
            fits,
        }
    }

    /// Creates an error for an element type that is not in `fits`.
    pub(crate) fn element_type(
        operation: &'static str,
        dtype: DType,
        device: impl Debug,
        fits: impl IntoIterator<Item = DType>,
    ) -> Self {
        let fits: Vec<_> = fits.into_iter().map(|fit| format!("{fit:?}")).collect();
        Self::Type {
            operation,
            dtype,
            device: format!("{device:?}"),
            fits: fits.join(", "),
        }
    }
}

/// Returns an error with this message if `fits` is false.
pub(crate) fn check_shape(
    operation: &'static str,
    fits: bool,
    message: impl FnOnce() -> String,
) -> Result<(), KernelError> {
    if fits {
        Ok(())
    } else {
        Err(KernelError::shape(operation, message()))
    }
}

/// Returns an error for the option `name` if `fits` is false. `expected` describes the valid values.
pub(crate) fn check_option(
    operation: &'static str,
    fits: bool,
    name: &'static str,
    value: impl ToString,
    expected: &'static str,
) -> Result<(), KernelError> {
    if fits {
        Ok(())
    } else {
        Err(KernelError::option(operation, name, value, expected))
    }
}

/// Returns an error if a tensor does not have the type `fits`. `named` is the name of this type for the error message.
pub(crate) fn check_type(
    operation: &'static str,
    name: &'static str,
    dtype: DType,
    (fits, named): (DType, &'static str),
) -> Result<(), KernelError> {
    let value = format_args!("{dtype:?}");
    check_option(operation, dtype == fits, name, value, named)
}

/// The argument of [`check_type`] that requires f32.
pub(crate) const F32: (DType, &str) = (DType::F32, "F32");

/// The argument of [`check_type`] that requires u32.
pub(crate) const U32: (DType, &str) = (DType::U32, "U32");

/// Returns an error if a tensor has a type different from the type of `x`.
pub(crate) fn check_same_type(
    operation: &'static str,
    x: DType,
    name: &'static str,
    dtype: DType,
) -> Result<(), KernelError> {
    let value = format_args!("{dtype:?} with x in {x:?}");
    check_option(operation, dtype == x, name, value, "the type of x")
}

/// Returns an error if a tensor does not have the type in which sums of `x` are computed.
pub(crate) fn check_sum_type(
    operation: &'static str,
    x: DType,
    name: &'static str,
    dtype: DType,
) -> Result<(), KernelError> {
    let value = format_args!("{dtype:?} with x in {x:?}");
    let expected = "F32, or F64 for F64";
    check_option(operation, dtype == wide(x), name, value, expected)
}

/// Returns the value of the result, or panics with the message of the error.
#[track_caller]
pub(crate) fn accept<T>(result: Result<T, KernelError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// Returns an error if a shape has more than [`MAX_ELEMENTS`] elements, or if the number of elements overflows.
pub(crate) fn check_size(operation: &'static str, shape: &[usize]) -> Result<(), KernelError> {
    let elements = shape
        .iter()
        .try_fold(1usize, |product, dim| product.checked_mul(*dim));
    match elements {
        Some(elements) if elements <= MAX_ELEMENTS => Ok(()),
        _ => Err(KernelError::TooLarge {
            operation,
            shape: shape.to_vec(),
        }),
    }
}
