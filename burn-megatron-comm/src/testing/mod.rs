//! Test support: the conformance suite that every engine passes, fault injection, simulated networks, and calls
//! that pass a closure.

pub mod conformance;
pub mod fault_injection;
mod intercept;
mod launches;
mod simulated_network;
mod wait;

pub use intercept::Intercept;
pub use launches::join_as_threads;
pub use simulated_network::{Link, LinkError, SimulatedNetwork, Transfer, hidden_share};
pub use wait::{TIMEOUT, wait_until};
