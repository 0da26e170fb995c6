//! The coordinator's decisions, as values, and the same over TCP.

mod decisions;
mod lines;
mod strangers;
