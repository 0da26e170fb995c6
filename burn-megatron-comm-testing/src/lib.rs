//! Tools that test and slow down communication: the conformance suite that every engine passes, fault injection,
//! simulated networks, and calls that pass a closure.

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
