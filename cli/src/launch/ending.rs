//! How a rank ended.

use std::fmt;

use super::error::UNSTARTABLE;

/// How the process of a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// It was never started, for this reason.
    Unstartable(String),
    /// Nobody is left to tell; what is known instead.
    Lost(String),
}

impl Ending {
    /// Whether the rank came to its end with success.
    pub fn is_success(&self) -> bool {
        *self == Self::Code(0)
    }

    /// The exit code of a run that failed by it: 128 + the signal, as shells have it.
    pub fn exit_code(&self) -> u8 {
        let code = match self {
            Self::Code(code) => *code,
            Self::Signal(signal) => 128 + signal,
            Self::Unstartable(_) => i32::from(UNSTARTABLE),
            Self::Lost(_) => 1,
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(signal) => write!(f, "ended by {}", signal_name(*signal)),
            Self::Unstartable(reason) => write!(f, "could not be started: {reason}"),
            Self::Lost(reason) => write!(f, "was lost: {reason}"),
        }
    }
}

/// A signal as a person knows it: `signal 9 (SIGKILL)`.
pub fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_has_a_text_and_a_code() {
        let cases = [
            (Ending::Code(3), "ended with exit code 3", 3),
            (Ending::Signal(9), "ended by signal 9 (SIGKILL)", 137),
            (Ending::Signal(11), "ended by signal 11 (SIGSEGV)", 139),
            (Ending::Signal(40), "ended by signal 40", 168),
            (
                Ending::Unstartable("gone".into()),
                "could not be started: gone",
                127,
            ),
            (Ending::Lost("gone".into()), "was lost: gone", 1),
        ];
        for (ending, text, code) in cases {
            assert_eq!(
                (ending.to_string().as_str(), ending.exit_code()),
                (text, code)
            );
            assert!(!ending.is_success());
        }
        assert!(Ending::Code(0).is_success());
    }
}
