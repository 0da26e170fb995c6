//! What a fused operation cannot work on.

use burn::tensor::DType;

/// Why an operation was refused, the same on every backend.
///
/// The operations panic with this message, as Burn's own do, before anything is allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// Shapes that do not agree.
    #[error("{operation}: {message}")]
    Shape {
        /// The operation.
        operation: &'static str,
        /// The shapes, and what would fit.
        message: String,
    },
    /// An element type that the operation, or the device, does not have.
    #[error("{operation} does not take {dtype:?} on {device}; {fits} fit")]
    Type {
        /// The operation.
        operation: &'static str,
        /// The type that was given.
        dtype: DType,
        /// The device, in words.
        device: String,
        /// The types that it takes there.
        fits: String,
    },
    /// An option out of its range.
    #[error("{operation}: {name} = {value} makes no sense; {fits} does")]
    Option {
        /// The operation.
        operation: &'static str,
        /// The option.
        name: &'static str,
        /// Its value.
        value: String,
        /// What would fit.
        fits: &'static str,
    },
    /// More elements than the kernels can count.
    #[error("{operation}: a tensor {shape:?} has more elements than the {MAX_ELEMENTS} that fit")]
    TooLarge {
        /// The operation.
        operation: &'static str,
        /// The shape that was given.
        shape: Vec<usize>,
    },
}

/// The largest number of elements of one tensor: kernels count them in 32 bits.
pub const MAX_ELEMENTS: usize = u32::MAX as usize;

impl KernelError {
    /// Shapes that do not agree.
    pub(crate) fn shape(operation: &'static str, message: impl Into<String>) -> Self {
        Self::Shape {
            operation,
            message: message.into(),
        }
    }
}

/// Returns the value, or panics with the message of the error.
#[track_caller]
pub(crate) fn accept<T>(result: Result<T, KernelError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// Refuses shapes with more elements than the kernels can count, an overflow included.
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
