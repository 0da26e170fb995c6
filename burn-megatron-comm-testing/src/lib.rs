//! Tools to test communication engines: a conformance suite, fault injection, and a simulated network.
//!
//! [`Intercept`] passes each call of a communicator to a closure. [`join_as_threads`] runs ranks that are normally
//! processes as threads. [`MatmulClock`] adds the time of matrix multiplications to the clock of a simulated network
//! link.

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
