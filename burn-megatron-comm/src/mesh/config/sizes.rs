//! The sizes of a layout.

use super::ParallelConfig;

impl ParallelConfig {
    /// Whether the experts are on other ranks than the layers next to them, which a model without experts has no use for.
    pub fn splits_experts(&self) -> bool {
        self.expert > 1 || self.expert_tensor_size() != self.tensor
    }

    /// The number of replicas of the model; 1 if it is left to the world.
    pub fn data_size(&self) -> usize {
        self.data.unwrap_or(1)
    }

    /// The ranks of one stage with different tokens, over which the dense parameters are summed and sharded:
    /// `context * data`.
    pub fn data_parallel_size(&self) -> usize {
        self.data_size().saturating_mul(self.context)
    }

    /// The required number of ranks: `tensor x context x pipeline x data`.
    ///
    /// `None` if `data` is `None`, or if the product overflows a `usize`.
    pub fn world_size(&self) -> Option<usize> {
        self.replica_size()?.checked_mul(self.data?)
    }

    /// The ranks of one replica of the model; `None` on overflow.
    pub(in crate::mesh) fn replica_size(&self) -> Option<usize> {
        self.tensor
            .checked_mul(self.context)?
            .checked_mul(self.pipeline)
    }

    /// The ranks of one replica of the experts; `None` on overflow.
    pub(in crate::mesh) fn expert_replica_size(&self) -> Option<usize> {
        self.expert_tensor_size()
            .checked_mul(self.expert)?
            .checked_mul(self.pipeline)
    }

    /// The size of the expert-tensor axis, which is the size of `tensor` by default.
    pub fn expert_tensor_size(&self) -> usize {
        self.expert_tensor.unwrap_or(self.tensor)
    }
}
