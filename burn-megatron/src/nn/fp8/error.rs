//! What 8-bit layers are refused for.

use super::Operand;
use crate::comm::CommError;
use crate::glob::{GlobFault, listed};

/// 8-bit layers that cannot be.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Fp8Error {
    /// A setting without a meaning.
    #[error("8-bit layers: {name} = {value}; {fits}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// What would fit.
        fits: &'static str,
    },
    /// A pattern that means nothing.
    #[error("the 8-bit layers `{pattern}`: {fault}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        fault: GlobFault,
    },
    /// No layer of the model has a path that the pattern fits.
    #[error("the 8-bit layers `{pattern}` fit no layer{}", listed(.nearest))]
    Unmatched {
        /// The pattern.
        pattern: String,
        /// The paths that it takes the fewest changes to fit, the nearest first.
        nearest: Vec<String>,
    },
    /// Two layers have one path.
    #[error("two 8-bit layers are called {path}; give each a path of its own")]
    Twice {
        /// The path.
        path: String,
    },
    /// A checkpoint has nothing for a layer.
    #[error("there is no 8-bit state of {path}{}", listed(.nearest))]
    NoState {
        /// The layer.
        path: String,
        /// The nearest of the paths that there are.
        nearest: Vec<String>,
    },
    /// A checkpoint's state does not fit the layer.
    #[error("the 8-bit state of {path}, {operand}: {reason}")]
    State {
        /// The layer.
        path: String,
        /// Of which tensor.
        operand: Operand,
        /// What is wrong.
        reason: String,
    },
    /// The ranks could not communicate.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for Fp8Error {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
