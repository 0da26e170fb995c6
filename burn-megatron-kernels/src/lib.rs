#![doc = "Fused operations for Burn with hand-written backward passes."]
//!
//! The crate knows nothing of ranks and is useful alone. Today it holds what the others stand on:
//!
//! - [`function`]: an operation given by its forward and its backward, written once on tensors and
//!   valid on every backend that Burn has (with and without `fusion`).
//! - [`philox`]: counter-based random numbers, so that a draw depends on its coordinates alone.
//!
//! Feature flags are Burn's own names, forwarded: `cuda`, `wgpu`, `fusion`, `tracing`.

mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
mod error;
pub mod function;
mod launch;
pub mod philox;
#[cfg(test)]
mod testing;

pub use error::{KernelError, MAX_ELEMENTS};
pub use function::{Function, apply};
