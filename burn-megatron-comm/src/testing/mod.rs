//! Test support: the conformance suite that every engine passes, fault injection, and simulated links.

pub mod conformance;
pub mod inject;
mod slow;
mod wait;

pub use slow::{Link, LinkError, SlowLink, Transfer, hidden_share};
pub use wait::{TIMEOUT, wait_until};
