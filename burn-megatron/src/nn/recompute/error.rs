//! The error type of activation recomputation.

use crate::comm::CommError;
use crate::glob::GlobError;

/// An error of activation recomputation or of its settings.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RecomputeError {
    /// A setting is invalid, or has no effect.
    #[error("invalid {name}: expected {expected}")]
    Setting {
        /// The name of the setting and its value.
        name: String,
        /// The valid values.
        expected: String,
    },
    /// A pattern is invalid.
    #[error("invalid pattern {pattern:?}: {fault}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The syntax error of the pattern.
        fault: GlobError,
    },
    /// The model has no module that matches a name or a pattern in the settings.
    #[error("{given} matches no module of this model that can be recomputed: expected {known}")]
    Unmatched {
        /// The name or the pattern in the settings.
        given: String,
        /// The names that the model supports.
        known: String,
    },
    /// The threads that copy activations to the host could not be started.
    #[error("cannot start the threads that copy activations to the host: {reason}")]
    Threads {
        /// The error of the operating system.
        reason: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl RecomputeError {
    pub(super) fn setting(name: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Setting {
            name: name.into(),
            expected: expected.into(),
        }
    }

    pub(super) fn unmatched<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Self {
        let known: Vec<_> = known.collect();
        Self::Unmatched {
            given: given.into(),
            known: match &known[..] {
                [] => "none, because the model has no such module".into(),
                known => format!("one of {}", known.join(", ")),
            },
        }
    }
}

impl From<CommError> for RecomputeError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
