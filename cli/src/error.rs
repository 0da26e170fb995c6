//! The error of a command.

/// Any error, which ends the command: its text goes to standard error.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
