//! Layouts, built one setting at a time.

use super::super::stages::LayerSplit;
use super::super::{
    Axis, AxisOrder, ContextExchange, ContextSplit, ScheduleSource, TpCommOverlap, ZeroStage,
};
use super::ParallelConfig;

impl ParallelConfig {
    /// Sets the number of ranks that share every weight matrix outside the experts.
    pub fn with_tensor(mut self, size: usize) -> Self {
        self.tensor = size;
        self
    }

    /// Sets the number of ranks that share every sequence.
    pub fn with_context(mut self, size: usize) -> Self {
        self.context = size;
        self
    }

    /// Sets which tokens of a sequence each rank of the context axis has.
    pub fn with_context_split(mut self, split: ContextSplit) -> Self {
        self.context_split = split;
        self
    }

    /// Sets how the ranks of the context axis compute attention to the keys and values of each other.
    pub fn with_context_exchange(mut self, exchange: ContextExchange) -> Self {
        self.context_exchange = Some(exchange);
        self
    }

    /// Sets the hierarchical exchange, with an all-to-all of `size` ranks.
    pub fn with_context_inner(mut self, size: usize) -> Self {
        self.context_exchange = Some(ContextExchange::Hierarchical);
        self.context_inner = Some(size);
        self
    }

    /// Sets that documents are shared by their length, with at most `tokens` tokens of a rank in a micro-batch.
    pub fn with_hybrid_context_parallel(mut self, tokens: usize) -> Self {
        self.hybrid_context_parallel = true;
        self.max_seqlen_per_dp_cp_rank = Some(tokens);
        self
    }

    /// Sets the number of ranks that share the layers.
    pub fn with_pipeline(mut self, size: usize) -> Self {
        self.pipeline = size;
        self
    }

    /// Sets the number of replicas of the model, instead of deriving it from the world.
    pub fn with_data(mut self, size: usize) -> Self {
        self.data = Some(size);
        self
    }

    /// Sets the number of ranks that share the experts.
    pub fn with_expert(mut self, size: usize) -> Self {
        self.expert = size;
        self
    }

    /// Sets the number of ranks that share every expert's weight matrices, instead of `tensor`.
    pub fn with_expert_tensor(mut self, size: usize) -> Self {
        self.expert_tensor = Some(size);
        self
    }

    /// Sets whether exchanges of experts travel under the computations of another micro-batch.
    pub fn with_overlap_moe_expert_parallel_comm(mut self, overlap: bool) -> Self {
        self.overlap_moe_expert_parallel_comm = overlap;
        self
    }

    /// Sets the order in which the axes number ranks.
    pub fn with_order(mut self, order: AxisOrder) -> Self {
        self.order = order;
        self
    }

    /// Sets the number of ranks of a node.
    pub fn with_ranks_per_node(mut self, ranks: usize) -> Self {
        self.ranks_per_node = Some(ranks);
        self
    }

    /// Sets whether activations between the blocks are split along the sequence.
    pub fn with_sequence_parallel(mut self, sequence_parallel: bool) -> Self {
        self.sequence_parallel = sequence_parallel;
        self
    }

    /// Sets how the exchanges of sequence parallelism overlap with products.
    pub fn with_tp_comm_overlap(mut self, method: TpCommOverlap) -> Self {
        self.tp_comm_overlap = Some(method);
        self
    }

    /// Sets the number of chunks into which the tokens of each rank are split.
    pub fn with_tp_comm_overlap_num_splits(mut self, splits: usize) -> Self {
        self.tp_comm_overlap_num_splits = Some(splits);
        self
    }

    /// Sets the pipeline schedule.
    pub fn with_schedule(mut self, schedule: impl Into<ScheduleSource>) -> Self {
        self.schedule = Some(schedule.into());
        self
    }

    /// Sets the number of stages per pipeline rank.
    pub fn with_virtual_stages(mut self, stages: usize) -> Self {
        self.virtual_stages = Some(stages);
        self
    }

    /// Sets how the layers are split over the pipeline stages.
    pub fn with_split(mut self, split: LayerSplit) -> Self {
        self.split = split;
        self
    }

    /// Sets the receives from each pipeline neighbour that are posted ahead of their position in the schedule.
    pub fn with_receives_ahead(mut self, receives: usize) -> Self {
        self.receives_ahead = Some(receives);
        self
    }

    /// Sets whether activations and their gradients are sent between stages in FP8.
    pub fn with_fp8_transfers(mut self, fp8: bool) -> Self {
        self.fp8_transfers = fp8;
        self
    }

    /// Sets what is sharded over the data axis.
    pub fn with_zero_stage(mut self, stage: ZeroStage) -> Self {
        self.zero_stage = stage;
        self
    }

    /// Sets the size of a sharding group of the data axis.
    pub fn with_hsdp(mut self, ranks: usize) -> Self {
        self.hsdp = Some(ranks);
        self
    }

    /// Sets the size of any axis.
    pub fn with_size(self, axis: Axis, size: usize) -> Self {
        match axis {
            Axis::Tensor => self.with_tensor(size),
            Axis::Context => self.with_context(size),
            Axis::Expert => self.with_expert(size),
            Axis::ExpertTensor => self.with_expert_tensor(size),
            Axis::Data => self.with_data(size),
            Axis::Pipeline => self.with_pipeline(size),
        }
    }
}
