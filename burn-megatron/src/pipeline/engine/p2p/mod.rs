//! Point-to-point transfers of activations and gradients between pipeline ranks.
//!
//! The schedule gives the order of the tensors between two ranks, and both know their shapes and type from [earlier
//! ones](ShapeCache), so a tensor is one message without a header, in device memory where the engine of the communicator
//! can. Receives are posted ahead of their use: see [`P2pConfig`].

mod communicator;
pub(super) mod fp8;
pub(super) mod shapes;

use crate::mesh::ParallelConfig;

pub(super) use communicator::P2pCommunicator;
pub use shapes::{ShapeCache, ShapeKey};

/// The settings for passing tensors between the stages of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct P2pConfig {
    /// The most receives from each neighbour that are posted ahead of their position in the schedule, each with the memory
    /// of its tensor. A tensor is waited for directly before its use. Results are bit-equal.
    pub receives_ahead: usize,
    /// Whether tensors are sent in FP8: E4M3 with one f32 scale for [128](burn_megatron_kernels::fp8::BLOCK) elements of
    /// the last dimension, so that a value `v` arrives as `v (1 + e)` with `|e| <= 2^-4`, or if it is below `2^-14.8` of the
    /// largest of its 128 with an error of at most `2^-18.8` of that.
    pub fp8: bool,
}

impl Default for P2pConfig {
    /// The defaults of layouts.
    fn default() -> Self {
        Self {
            receives_ahead: ParallelConfig::RECEIVES_AHEAD,
            fp8: false,
        }
    }
}

impl P2pConfig {
    /// The settings of a layout.
    pub fn of(layout: &ParallelConfig) -> Self {
        Self {
            receives_ahead: layout.receives_ahead(),
            fp8: layout.fp8_transfers,
        }
    }
}
