//! Errors of the settings of recomputation.

use crate::comm::CommError;
use crate::glob::GlobError;

/// Invalid settings of recomputation.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RecomputeError {
    /// A setting is invalid, or has no effect.
    #[error("invalid {name}: expected {expected}")]
    Setting {
        /// The setting, with its value.
        name: String,
        /// The values that would fit.
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
    /// A name or a pattern without a module.
    #[error("{given} is of no module that can be recomputed here: expected {known}")]
    Unmatched {
        /// The name or the pattern.
        given: String,
        /// The names that the model has.
        known: String,
    },
    /// The threads that copy activations cannot be started.
    #[error("cannot start the threads that copy activations to the host: {reason}")]
    Threads {
        /// The error of the system.
        reason: String,
    },
    /// The ranks could not exchange what they have.
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
                [] => "none, as there is none".into(),
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
