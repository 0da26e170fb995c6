#![doc = "Fused operations for Burn with hand-written backward passes."]
//!
//! The crate has no concept of ranks and can be used on its own. An operation is a function on
//! `Tensor`s, with or without autodiff. It has a CubeCL kernel for GPUs, an implementation for
//! Burn's CPU backend, and a backward that saves little memory. Each operation has an unfused
//! reference, `composed`, made of Burn's operations.
//!
//! | operation | fused steps |
//! |---|---|
//! | [`norm`] | LayerNorm and RMSNorm, with the preceding bias and addition to the residual stream |
//! | [`activation`] | GELU, SwiGLU and related activations, with the preceding bias and following row weights |
//! | [`dropout`] | bias, dropout, residual addition |
//! | [`rope`] | rotary positions of queries and keys in one launch |
//! | [`attention`] | scores, softmax and weighted sum, without the scores in memory |
//! | [`softmax`] | scale, mask, softmax |
//! | [`cross_entropy`] | log-sum-exp, loss and gradient, also for a split vocabulary |
//! | [`adamw`] | an optimizer step over a flat buffer; sums of squares |
//! | [`gemm`] | matrix products with a bias, or added to a buffer |
//! | [`column_sum`] | sums over the rows of a matrix, such as bias gradients |
//! | [`embedding`] | the gradient of a lookup, added to the rows that were read |
//! | [`moe`] | mixture of experts: router, rows by expert, products per expert, sums of losses |
//! | [`flat`] | values written or added to a buffer of many tensors |
//! | [`fp8`] | 8-bit floats: quantisers and products of quantised matrices |
//! | [`bits`] | bit casts between types |
//!
//! The operations are built on [`function`] and [`philox`]. [`function`] defines an operation by its forward and its
//! backward. [`philox`] provides counter-based random numbers, so that a draw depends only on its coordinates.
//! [`record`] runs operations on shapes, without values. [`cuda_graph`] captures and replays them.
//!
//! The feature flags have Burn's names and are forwarded to Burn: `cuda`, `wgpu`, `fusion`,
//! `tracing`.

// CubeCL kernels are expanded before they are compiled. A compile-time condition cannot be joined
// with a runtime condition, and only ranges are unrolled, not iterators.
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
#[cfg(feature = "cubecl")]
pub mod aot;
pub mod attention;
pub mod bits;
pub mod column_sum;
mod cpu;
pub mod cross_entropy;
#[cfg(feature = "cubecl")]
mod cube;
pub mod cuda_graph;
pub mod device_memory;
pub mod dropout;
pub mod embedding;
mod error;
pub mod flat;
pub mod fp8;
pub mod function;
pub mod gemm;
pub mod gradient;
mod launch;
pub mod moe;
pub mod norm;
pub mod philox;
pub mod record;
pub mod rope;
pub mod soft_cap;
pub mod softmax;
#[cfg(test)]
mod testing;
pub mod unchecked;

pub use error::{KernelError, MAX_ELEMENTS};
pub use function::{Function, MultiFunction, apply, apply_multi};
