//! Errors of the recomputation settings.

use crate::comm::CommError;
use crate::glob::GlobError;

/// An error of the recomputation settings.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RecomputeError {
    /// A setting is invalid, or has no effect.
    #[error("invalid {name}: expected {expected}")]
    Setting {
        /// The setting with its value.
        name: String,
        /// The valid values.
        expected: String,
    },
    /// An invalid pattern.
    #[error("invalid pattern {pattern:?}: {fault}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The syntax error of the pattern.
        fault: GlobError,
    },
    /// The model has no module for a name or a pattern.
    #[error("{given} matches no module of this model that can be recomputed: expected {known}")]
    Unmatched {
        /// The name or the pattern in the settings.
        given: String,
        /// The names that the model has.
        known: String,
    },
    /// The threads that copy activations cannot be started.
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
