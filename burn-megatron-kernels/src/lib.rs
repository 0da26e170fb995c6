#![doc = "Fused operations for Burn with hand-written backward passes."]
//!
//! The crate does not depend on ranks or communication and can be used on its own. An operation is a function on
//! `Tensor`s, with or without autodiff. Each operation has a CubeCL kernel for GPUs, an implementation for Burn's CPU
//! backend, and a backward pass that saves few tensors. Each operation also has an unfused reference implementation in
//! a module named `composed`, which uses only Burn's operations.
//!
//! | operation | fused steps |
//! |---|---|
//! | [`norm`] | LayerNorm and RMSNorm, with the preceding bias and addition to the residual stream |
//! | [`activation`] | GELU, SwiGLU and related activations, with the preceding bias and following row weights |
//! | [`dropout`] | bias, dropout, residual addition |
//! | [`rope`] | rotary position embedding of queries and keys in one kernel launch |
//! | [`attention`] | scores, softmax and weighted sum of the values, without storing the scores |
//! | [`softmax`] | scale, mask, softmax |
//! | [`cross_entropy`] | log-sum-exp, loss and gradient, also for a sharded vocabulary |
//! | [`adamw`] | an AdamW step over a flat buffer, and sums of squares |
//! | [`gemm`] | matrix multiplication that adds a bias or accumulates into a buffer |
//! | [`column_sum`] | sums over the rows of a matrix, such as bias gradients |
//! | [`embedding`] | the gradient of an embedding lookup, added to the gradient of the table rows that were looked up |
//! | [`moe`] | mixture of experts: router, token permutation, grouped GEMM, sums for the auxiliary losses |
//! | [`flat`] | copies and additions into a flat buffer that holds many tensors |
//! | [`fp8`] | FP8 quantization, and matrix multiplication of quantized matrices |
//! | [`bits`] | bit casts between types |
//!
//! The operations are built on [`function`] and [`philox`]. [`function`] defines an operation by its forward pass and
//! its backward pass. [`philox`] provides counter-based random numbers, which depend only on a key and a counter.
//! [`record`] records the operations of a model on the shapes of tensors, without computing values. [`cuda_graph`]
//! captures kernel launches and replays them.
//!
//! The feature flags enable the Burn features with the same names: `cuda`, `wgpu`, `fusion`, `tracing`.

// CubeCL expands kernels before they are compiled. In kernels, a compile-time condition cannot be joined with a runtime
// condition, and only loops over ranges can be unrolled, not loops over iterators.
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
