//! Point-to-point transfers of activations and gradients between pipeline ranks.
//!
//! The schedule determines the order of the tensors between two ranks. Both ranks know the shape and type of a
//! tensor from [earlier tensors](ShapeCache), so a tensor is one message without a header. The message is sent
//! from device memory if the engine of the communicator supports it. Receives are posted ahead of their use:
//! see [`P2pConfig`].

mod communicator;
pub(super) mod fp8;
pub(super) mod shapes;

use crate::mesh::ParallelConfig;

pub(super) use communicator::P2pCommunicator;
pub use shapes::{ShapeCache, ShapeKey};

/// The settings for passing tensors between the stages of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct P2pConfig {
    /// The maximum number of receives from each neighbor that are posted ahead of their position in the
    /// schedule. Each uses the memory of its tensor. The engine waits for a tensor directly before its use.
    /// Results are bit-equal.
    pub receives_ahead: usize,
    /// Whether tensors are sent in FP8: E4M3 with one f32 scale per [128](burn_megatron_kernels::fp8::BLOCK)
    /// elements of the last dimension. A value `v` arrives as `v (1 + e)` with `|e| <= 2^-4`. If `v` is below
    /// `2^-14.8` times the largest value of its block, its error is at most `2^-18.8` times this largest value.
    pub fp8: bool,
}

impl Default for P2pConfig {
    /// Returns the defaults of layouts.
    fn default() -> Self {
        Self {
            receives_ahead: ParallelConfig::RECEIVES_AHEAD,
            fp8: false,
        }
    }
}

impl P2pConfig {
    /// Returns the settings of a layout.
    pub fn of(layout: &ParallelConfig) -> Self {
        Self {
            receives_ahead: layout.receives_ahead(),
            fp8: layout.fp8_transfers,
        }
    }
}
