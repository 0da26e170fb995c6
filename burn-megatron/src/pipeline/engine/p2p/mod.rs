//! Point-to-point transfers of activations and gradients between pipeline ranks.
//!
//! The schedule determines the order in which two ranks exchange tensors. Both ranks have the shape and dtype of the
//! next tensor in a [cache](ShapeCache), which earlier tensors have filled. A tensor is therefore sent as one message
//! without a header. The message is sent from device memory if the engine of the communicator supports the device.
//! Receives are posted before the tensors are needed: see [`P2pConfig`].

mod communicator;
pub(super) mod fp8;
pub(super) mod shapes;

use crate::mesh::ParallelConfig;

pub(super) use communicator::P2pCommunicator;
pub use shapes::{ShapeCache, ShapeKey};

/// Settings of the point-to-point transfers between pipeline stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct P2pConfig {
    /// The maximum number of receives from each neighbor that are posted ahead of their position in the schedule. Each
    /// posted receive allocates the memory of its tensor. The engine waits for a tensor directly before it is used. The
    /// setting does not change the results.
    pub receives_ahead: usize,
    /// Whether tensors are sent in FP8 (E4M3), with one f32 scale for each block of
    /// [128](burn_megatron_kernels::fp8::BLOCK) elements of the last dimension. A value `v` is received as `v (1 + e)`
    /// with `|e| <= 2^-4`. If `v` is smaller than `2^-14.8` times the largest value of its block, the error of `v` is
    /// at most `2^-18.8` times this largest value.
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
    /// Returns the point-to-point settings of a parallel layout.
    pub fn of(layout: &ParallelConfig) -> Self {
        Self {
            receives_ahead: layout.receives_ahead(),
            fp8: layout.fp8_transfers,
        }
    }
}
