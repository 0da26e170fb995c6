//! The error type of commands.

/// Any error that ends the command. Its text is printed to standard error.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
