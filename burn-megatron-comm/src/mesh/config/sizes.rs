//! The sizes that are derived from a parallel layout.

use super::ParallelConfig;

impl ParallelConfig {
    /// Returns whether the experts are distributed over the ranks in a different way than the dense layers. The result
    /// has no meaning for a model without experts.
    pub fn splits_experts(&self) -> bool {
        self.expert > 1 || self.expert_tensor_size() != self.tensor
    }

    /// Returns the number of model replicas. Returns 1 if `data` is `None`, which means that the number is derived from
    /// the world size.
    pub fn data_size(&self) -> usize {
        self.data.unwrap_or(1)
    }

    /// Returns the number of ranks of one pipeline stage that process different tokens, `context * data`. The dense
    /// parameters are reduced and sharded over these ranks.
    pub fn data_parallel_size(&self) -> usize {
        self.data_size().saturating_mul(self.context)
    }

    /// Returns the required number of ranks: `tensor x context x pipeline x data`.
    ///
    /// Returns `None` if `data` is `None`, or if the product overflows a `usize`.
    pub fn world_size(&self) -> Option<usize> {
        self.replica_size()?.checked_mul(self.data?)
    }

    /// Returns the number of ranks of one model replica, or `None` on overflow.
    pub(in crate::mesh) fn replica_size(&self) -> Option<usize> {
        self.tensor
            .checked_mul(self.context)?
            .checked_mul(self.pipeline)
    }

    /// Returns the number of ranks of one replica of the experts, or `None` on overflow.
    pub(in crate::mesh) fn expert_replica_size(&self) -> Option<usize> {
        self.expert_tensor_size()
            .checked_mul(self.expert)?
            .checked_mul(self.pipeline)
    }

    /// Returns the size of the expert-tensor axis. The default is the size of the tensor axis.
    pub fn expert_tensor_size(&self) -> usize {
        self.expert_tensor.unwrap_or(self.tensor)
    }
}
