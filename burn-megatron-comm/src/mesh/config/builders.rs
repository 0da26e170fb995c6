//! Builder methods of a parallel layout.

use super::super::stages::LayerSplit;
use super::super::{
    Axis, AxisOrder, ContextExchange, ContextSplit, ScheduleSource, TpCommOverlap, ZeroStage,
};
use super::ParallelConfig;

/// Defines methods that set one field each.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($value:ident: $type:ty) => $field:ident = $set:expr;)*) => {$(
        $(#[$doc])*
        pub fn $name(mut self, $value: $type) -> Self {
            self.$field = $set;
            self
        }
    )*};
}

impl ParallelConfig {
    setters! {
        /// Sets the number of ranks that share each weight matrix outside the experts.
        with_tensor(size: usize) => tensor = size;

        /// Sets the number of ranks that share each sequence.
        with_context(size: usize) => context = size;

        /// Sets the method that distributes the tokens of a sequence over the context-parallel ranks.
        with_context_split(split: ContextSplit) => context_split = split;

        /// Sets the method that exchanges keys and values between context-parallel ranks.
        with_context_exchange(exchange: ContextExchange) => context_exchange = Some(exchange);

        /// Sets the number of ranks that share the layers.
        with_pipeline(size: usize) => pipeline = size;

        /// Sets the number of model replicas. If it is not set, it is derived from the world size.
        with_data(size: usize) => data = Some(size);

        /// Sets the number of ranks that share the experts.
        with_expert(size: usize) => expert = size;

        /// Sets the number of ranks that share each expert's weight matrices. The default is the tensor-parallel size.
        with_expert_tensor(size: usize) => expert_tensor = Some(size);

        /// Sets whether expert-parallel token exchanges overlap with the computation of another micro-batch.
        with_overlap_moe_expert_parallel_comm(overlap: bool) => overlap_moe_expert_parallel_comm = overlap;

        /// Sets the order in which the axes number the ranks.
        with_order(order: AxisOrder) => order = order;

        /// Sets the number of ranks per node.
        with_ranks_per_node(ranks: usize) => ranks_per_node = Some(ranks);

        /// Sets whether the activations between the transformer blocks are split along the sequence dimension.
        with_sequence_parallel(sequence_parallel: bool) => sequence_parallel = sequence_parallel;

        /// Sets the method that overlaps the collectives of sequence parallelism with matrix multiplications.
        with_tp_comm_overlap(method: TpCommOverlap) => tp_comm_overlap = Some(method);

        /// Sets the number of chunks into which the overlap splits the tokens of each rank.
        with_tp_comm_overlap_num_splits(splits: usize) => tp_comm_overlap_num_splits = Some(splits);

        /// Sets the pipeline schedule.
        with_schedule(schedule: impl Into<ScheduleSource>) => schedule = Some(schedule.into());

        /// Sets the number of pipeline stages per pipeline rank.
        with_virtual_stages(stages: usize) => virtual_stages = Some(stages);

        /// Sets the distribution of the layers over the pipeline stages.
        with_split(split: LayerSplit) => split = split;

        /// Sets the number of receives from each pipeline neighbor that are posted before their position in the
        /// schedule.
        with_receives_ahead(receives: usize) => receives_ahead = Some(receives);

        /// Sets whether activations and their gradients are sent between stages in FP8.
        with_fp8_transfers(fp8: bool) => fp8_transfers = fp8;

        /// Sets the ZeRO stage: the state that is sharded over the data axis.
        with_zero_stage(stage: ZeroStage) => zero_stage = stage;

        /// Sets the number of ranks in each sharding group of the data axis (HSDP).
        with_hsdp(ranks: usize) => hsdp = Some(ranks);
    }

    /// Selects the hierarchical context exchange, with all-to-all groups of `size` ranks.
    pub fn with_context_inner(mut self, size: usize) -> Self {
        self.context_exchange = Some(ContextExchange::Hierarchical);
        self.context_inner = Some(size);
        self
    }

    /// Enables hybrid context parallelism, with at most `tokens` tokens per rank in a micro-batch.
    pub fn with_hybrid_context_parallel(mut self, tokens: usize) -> Self {
        self.hybrid_context_parallel = true;
        self.max_seqlen_per_dp_cp_rank = Some(tokens);
        self
    }

    /// Sets the size of the axis `axis`.
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
