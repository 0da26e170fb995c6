//! Conformance suite for engines, fault injection, and simulated networks.
//!
//! [`Intercept`] passes each call of a communicator to a closure. [`join_as_threads`] runs the ranks of a process world
//! as
//! threads. [`MatmulClock`] adds the time of matrix products to the clock of a simulated link.

pub mod conformance;
pub mod fault_injection;
mod intercept;
mod launches;
mod matmul_clock;
mod simulated_network;

pub use intercept::Intercept;
pub use launches::join_as_threads;
pub use matmul_clock::MatmulClock;
pub use simulated_network::{Link, LinkError, SimulatedNetwork, Transfer, hidden_share};

#[cfg(test)]
mod tests;
