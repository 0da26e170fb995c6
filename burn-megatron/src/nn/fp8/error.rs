//! The error type of FP8 layers.

use super::Operand;
use crate::comm::CommError;
use crate::glob::{GlobError, listed};

/// An error of the FP8 layers.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Fp8Error {
    /// A setting is invalid.
    #[error("FP8 layers: invalid {name} = {value}: expected {expected}")]
    Setting {
        /// The name of the setting.
        name: &'static str,
        /// The given value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// A pattern is invalid.
    #[error("FP8 layers: invalid pattern `{pattern}`: {fault}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The reason why the pattern is invalid.
        fault: GlobError,
    },
    /// No layer of the model has a path that matches the pattern.
    #[error("FP8 layers: `{pattern}` matches no layer{}", listed(.nearest))]
    Unmatched {
        /// The pattern.
        pattern: String,
        /// The paths with the smallest edit distance to the pattern.
        nearest: Vec<String>,
    },
    /// Two layers have the same path.
    #[error("FP8 layers: two layers have the path {path}; give each its own")]
    Duplicate {
        /// The path of the layers.
        path: String,
    },
    /// A checkpoint has no FP8 state for a layer.
    #[error("there is no FP8 state of {path}{}", listed(.nearest))]
    MissingState {
        /// The path of the layer.
        path: String,
        /// The most similar paths in the checkpoint.
        nearest: Vec<String>,
    },
    /// The FP8 state of a checkpoint does not fit the layer.
    #[error("invalid FP8 state of {path}, {operand}: {reason}")]
    State {
        /// The path of the layer.
        path: String,
        /// The operand of the layer whose state does not fit.
        operand: Operand,
        /// The reason why the state does not fit.
        reason: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for Fp8Error {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
