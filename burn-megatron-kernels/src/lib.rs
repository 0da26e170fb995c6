#![doc = "Fused operations for Burn with hand-written backward passes."]
//!
//! The crate knows nothing of ranks and is useful alone. An operation is a function on `Tensor`s,
//! tracked or not, with a CubeCL kernel for GPUs, a form of its own for Burn's CPU device, and a
//! backward that saves little. Beside each stands `composed`: the same made of Burn's operations.
//!
//! | operation | what it fuses |
//! |---|---|
//! | [`norm`] | LayerNorm and RMSNorm, with the addition to the residual stream |
//! | [`activation`] | GELU, SwiGLU and their kin, with the bias before and weights of rows after |
//! | [`dropout`] | bias, dropout, residual addition |
//! | [`rope`] | rotary positions of queries and keys in one launch |
//! | [`attention`] | scores, softmax and weighted sum, without the scores in memory |
//! | [`softmax`] | scale, mask, softmax |
//! | [`cross_entropy`] | log-sum-exp, loss and gradient, also for a split vocabulary |
//! | [`adamw`] | a step over a flat buffer; sums of squares |
//! | [`gemm`] | matrix products with a bias, or added to what is there |
//! | [`flat`] | values written into a buffer of many tensors, or added there |
//! | [`fp8`] | 8-bit floats: quantisers and products of quantised matrices |
//! | [`bits`] | the bits of one type as those of another |
//!
//! They stand on [`function`] (an operation given by its forward and its backward) and [`philox`]
//! (counter-based random numbers, so that a draw depends on its coordinates alone).
//!
//! Feature flags are Burn's own names, forwarded: `cuda`, `wgpu`, `fusion`, `tracing`.

// A kernel is Rust to read, but not to compile: a condition at expansion time cannot be joined with
// one on the device, and ranges, not iterators, are unrolled.
#![cfg_attr(
    feature = "cubecl",
    allow(
        clippy::collapsible_if,
        clippy::collapsible_match,
        clippy::len_zero,
        clippy::manual_div_ceil,
        clippy::needless_range_loop,
        clippy::single_match
    )
)]

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod bits;
mod cpu;
pub mod cross_entropy;
#[cfg(feature = "cubecl")]
mod cube;
pub mod dropout;
mod error;
pub mod flat;
pub mod fp8;
pub mod function;
pub mod gemm;
mod launch;
pub mod norm;
pub mod philox;
pub mod rope;
pub mod softmax;
#[cfg(test)]
mod testing;

#[cfg(feature = "cubecl")]
pub use cube::specimen;
pub use error::{KernelError, MAX_ELEMENTS};
pub use function::{Function, apply};
