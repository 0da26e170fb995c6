//! Micro-batches that are captured in CUDA graphs.

use burn::module::Module;

use super::DistributedDataParallel;
use crate::data_parallel::gradient_buckets::MicroBatchUses;
use crate::nn::hook::DeferringSink;

impl<M: Module> DistributedDataParallel<M> {
    /// Holds back gradient reductions, so that no reduction starts during the next micro-batch. The method waits until
    /// all parameters are gathered, and assigns the [static
    /// buffers](crate::data_parallel::DataParallelConfig::static_buffers) of the gradients.
    pub fn hold_reductions(&self) {
        self.buffers.parameters().wait();
        self.buffers.gradients().hold();
    }

    /// Starts the reductions that [`hold_reductions`](Self::hold_reductions) has held back and that are ready after the
    /// micro-batches so far. `is_last` is true after the last micro-batch of the step.
    pub fn release_reductions(&self, is_last: bool) {
        self.buffers.gradients().release();
        if is_last {
            self.buffers.gradients().end_forwards(None);
        }
    }

    /// Runs a micro-batch while its kernel launches are captured in a CUDA graph. The capture does not count as a
    /// micro-batch of the step.
    pub fn capture_micro_batch<T>(&self, body: impl FnOnce() -> T) -> (T, MicroBatchUses) {
        let before = self.buffers.gradients().counted();
        let result = body();
        let uses = self.buffers.gradients().take_back(before);
        (result, uses)
    }

    /// Counts a micro-batch that ran as the replay of a CUDA graph.
    pub fn count_micro_batch(&self, uses: &MicroBatchUses) {
        self.buffers.begin_stage(0);
        self.buffers.gradients().count(uses);
    }

    /// Returns the memory identifiers of the parameters and of the gradient buffers. Call this method while reductions
    /// are [held back](Self::hold_reductions).
    pub fn memory_ids(&self) -> Vec<Option<usize>> {
        let mut ids = self.buffers.parameters().memory_ids();
        if let Some(frozen) = &self.buffers.frozen {
            ids.extend(frozen.buckets().memory_ids());
        }
        ids.extend(self.buffers.gradients().memory_ids());
        ids
    }
}
