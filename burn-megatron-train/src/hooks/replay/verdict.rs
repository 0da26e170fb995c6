//! The errors of replay checks.

use std::fmt;

/// A replay check found a wrong result. All ranks return the same error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step}: {verdict}: {message}")]
pub struct ReplayError {
    /// The step, from 1.
    pub step: usize,
    /// The verdict.
    pub verdict: Verdict,
    /// The difference, with its rank, layer and tensor.
    pub message: String,
}

/// The cause of a wrong result, as far as repeated computations can tell. Each verdict has an exit code, from which a
/// launcher decides whether to restart the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A single one of several equal computations gave a different result.
    Transient,
    /// Weights or optimizer state changed between two steps, or differ on ranks that hold the same state.
    StateChanged,
    /// The device of a rank computes a different result than the device of another rank.
    Device,
    /// Equal computations give different results: the program or a library is not deterministic.
    NotDeterministic,
    /// The result is the same on another device, so its cause is the data, the settings or the program.
    DataOrSoftware,
}

impl Verdict {
    /// All verdicts, in the order of their exit codes.
    pub const ALL: [Self; 5] = [
        Self::Transient,
        Self::StateChanged,
        Self::Device,
        Self::NotDeterministic,
        Self::DataOrSoftware,
    ];

    /// Returns the exit code of a process that ends with this verdict.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Transient => 5,
            Self::StateChanged => 6,
            Self::Device => 7,
            Self::NotDeterministic => 8,
            Self::DataOrSoftware => 9,
        }
    }

    /// Returns the verdict with this exit code.
    pub fn from_exit_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.exit_code() == code)
    }

    /// Returns whether a run that is resumed from its last checkpoint on the same devices may succeed.
    pub const fn may_pass_after_restart(self) -> bool {
        matches!(self, Self::Transient | Self::StateChanged)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Transient => "a transient fault",
            Self::StateChanged => "weights or the state of the optimizer changed",
            Self::Device => "a fault of a device",
            Self::NotDeterministic => "not deterministic",
            Self::DataOrSoftware => "data or software",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_distinct_and_found_again() {
        for verdict in Verdict::ALL {
            assert_eq!(Verdict::from_exit_code(verdict.exit_code()), Some(verdict));
        }
        for code in [0, 1, 2, 3, 4, 10, 127, 130, 137] {
            assert_eq!(Verdict::from_exit_code(code), None, "{code}");
        }
    }
}
