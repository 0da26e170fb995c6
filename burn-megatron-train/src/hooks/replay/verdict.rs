//! The reason for which a check of a step ended a run.

use std::fmt;

/// A check of a step found a wrong result. The same on all ranks.
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

/// The cause of a wrong result of a step, as far as a second computation of the step tells. Each is an exit code of a
/// rank, by which a launcher decides whether to start the run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// One of several equal computations gave another result, once.
    Transient,
    /// Weights or the state of the optimizer changed between two steps, or weights differ on ranks that have the same.
    StateChanged,
    /// The device of a rank computes another result than that of another rank.
    Device,
    /// Equal computations always give other results: the program or a library is not deterministic.
    NotDeterministic,
    /// The result is the same on another device: it is due to the data, the settings or the program.
    DataOrSoftware,
}

impl Verdict {
    /// All of them, in the order of their exit codes.
    pub const ALL: [Self; 5] = [
        Self::Transient,
        Self::StateChanged,
        Self::Device,
        Self::NotDeterministic,
        Self::DataOrSoftware,
    ];

    /// The exit code of a process that ends with it.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Transient => 5,
            Self::StateChanged => 6,
            Self::Device => 7,
            Self::NotDeterministic => 8,
            Self::DataOrSoftware => 9,
        }
    }

    /// The verdict with this exit code.
    pub fn from_exit_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.exit_code() == code)
    }

    /// Whether a run that is resumed from its last checkpoint on the same devices may succeed.
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
