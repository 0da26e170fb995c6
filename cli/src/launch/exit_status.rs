//! The exit status of a rank.

use std::fmt;

use nix::sys::signal::Signal;

use super::error::NOT_STARTED;

/// End of a rank's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankExitStatus {
    /// The process exited with this code.
    Code(i32),
    /// The process was ended by this signal.
    Signal(i32),
    /// The process could not be started, for this reason.
    NotStarted(String),
    /// The exit status is unknown, for this reason.
    Lost(String),
}

impl RankExitStatus {
    /// Returns whether the rank exited with code 0.
    pub fn is_success(&self) -> bool {
        *self == Self::Code(0)
    }

    /// Returns the exit code of a run in which this rank failed. This is the exit code of the rank, or 128 + the
    /// signal as in a shell.
    pub fn exit_code(&self) -> u8 {
        let code = match self {
            Self::Code(code) => *code,
            Self::Signal(signal) => 128 + signal,
            Self::NotStarted(_) => i32::from(NOT_STARTED),
            Self::Lost(_) => 1,
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }
}

impl fmt::Display for RankExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(signal) => write!(f, "ended by {}", signal_name(*signal)),
            Self::NotStarted(reason) => write!(f, "could not be started: {reason}"),
            Self::Lost(reason) => write!(f, "was lost: {reason}"),
        }
    }
}

/// Returns the number and the name of a signal: `signal 9 (SIGKILL)`.
pub fn signal_name(signal: i32) -> String {
    match Signal::try_from(signal) {
        Ok(known) => format!("signal {signal} ({known})"),
        Err(_) => format!("signal {signal}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_status_has_a_text_and_a_code() {
        let cases = [
            (RankExitStatus::Code(3), "ended with exit code 3", 3),
            (
                RankExitStatus::Signal(9),
                "ended by signal 9 (SIGKILL)",
                137,
            ),
            (
                RankExitStatus::Signal(11),
                "ended by signal 11 (SIGSEGV)",
                139,
            ),
            (RankExitStatus::Signal(40), "ended by signal 40", 168),
            (
                RankExitStatus::NotStarted("gone".into()),
                "could not be started: gone",
                127,
            ),
            (RankExitStatus::Lost("gone".into()), "was lost: gone", 1),
        ];
        for (status, text, code) in cases {
            assert_eq!(
                (status.to_string().as_str(), status.exit_code()),
                (text, code)
            );
            assert!(!status.is_success());
        }
        assert!(RankExitStatus::Code(0).is_success());
    }
}
