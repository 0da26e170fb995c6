//! Errors of 8-bit layers.

use super::Operand;
use crate::comm::CommError;
use crate::glob::{GlobError, listed};

/// An error of the 8-bit layers.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Fp8Error {
    /// An invalid setting.
    #[error("8-bit layers: invalid {name} = {value}: expected {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// An invalid pattern.
    #[error("8-bit layers: invalid pattern `{pattern}`: {fault}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Why it is invalid.
        fault: GlobError,
    },
    /// No layer of the model has a path that matches the pattern.
    #[error("8-bit layers: `{pattern}` matches no layer{}", listed(.nearest))]
    Unmatched {
        /// The pattern.
        pattern: String,
        /// The paths nearest to the pattern, by edit distance.
        nearest: Vec<String>,
    },
    /// Two layers have the same path.
    #[error("8-bit layers: two layers have the path {path}; give each its own")]
    Duplicate {
        /// The path.
        path: String,
    },
    /// A checkpoint has no state of a layer.
    #[error("there is no 8-bit state of {path}{}", listed(.nearest))]
    MissingState {
        /// The layer.
        path: String,
        /// The nearest paths in the checkpoint.
        nearest: Vec<String>,
    },
    /// A checkpoint's state does not fit the layer.
    #[error("invalid 8-bit state of {path}, {operand}: {reason}")]
    State {
        /// The layer.
        path: String,
        /// The tensor.
        operand: Operand,
        /// Why it does not fit.
        reason: String,
    },
    /// The communication failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for Fp8Error {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
