//! The errors of replay checks.

use std::fmt;

/// The error of a replay check that found a wrong result. All ranks return the same error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step}: {verdict}: {message}")]
pub struct ReplayError {
    /// The step, counted from 1.
    pub step: usize,
    /// The probable cause of the wrong result.
    pub verdict: Verdict,
    /// A description of the difference, with the rank, the layer and the tensor.
    pub message: String,
}

/// The probable cause of a wrong result, which follows from repeated computations. Each verdict has an exit code, with
/// which a launcher can decide whether to restart the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A transient fault: one of several identical computations gave a different result.
    Transient,
    /// Weights or optimizer state changed between two steps, or differ between ranks that hold the same state.
    StateChanged,
    /// The device of one rank computes a different result than the device of another rank.
    Device,
    /// The program or a library is not deterministic: identical computations repeatedly give different results.
    NotDeterministic,
    /// Another device computes the same result, so the cause is the data, the settings or the program.
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

    /// Returns the verdict that has this exit code, or `None` if no verdict has it.
    pub fn from_exit_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.exit_code() == code)
    }

    /// Whether the run may succeed if it is resumed from its last checkpoint on the same devices.
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
