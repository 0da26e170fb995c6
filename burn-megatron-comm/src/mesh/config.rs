//! The parallel layout of a training run.

mod builders;
mod sizes;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::stages::LayerSplit;
use super::{
    Axis, AxisOrder, ContextExchange, ContextSplit, ScheduleKind, ScheduleSource, TpCommOverlap,
    ZeroStage,
};

/// The parallel layout of a training run: the size of each parallelism axis, and how the axes are used.
///
/// This type only stores values. [`Mesh::new`](super::Mesh::new) checks them. A
/// [`ParallelContext`](crate::ParallelContext) passes the layout to all modules that are built for it. In a recipe file
/// every field is optional, and an unknown field is an error.
///
/// ```text
/// tensor = 2
/// pipeline = 4
/// schedule = "interleaved"
/// order = "tp-cp-ep-dp-pp"
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelConfig {
    /// The tensor-parallel size: the number of ranks that share each weight matrix outside the experts.
    #[schemars(extend("flag" = "tp"))]
    pub tensor: usize,
    /// The data-parallel size: the number of model replicas. Each replica processes a part of the batch. `None`
    /// (`auto` on the command line) means the world size divided by the product of the other axes. The default in a
    /// recipe is 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("flag" = "dp", "value" = "N|auto"))]
    pub data: Option<usize>,
    /// Whether the activations between the transformer blocks are split along the sequence dimension over the tensor
    /// axis.
    #[schemars(extend("flag" = "sp", "needs" = "tensor > 1"))]
    pub sequence_parallel: bool,
    /// The method that overlaps the collectives of sequence parallelism with the adjacent matrix multiplications, in
    /// chunks. `None` disables the overlap.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("needs" = "sequence_parallel"))]
    pub tp_comm_overlap: Option<TpCommOverlap>,
    /// The number of chunks into which `tp_comm_overlap` splits the tokens of each rank. With `None`, the number is
    /// chosen from the sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("needs" = "sequence_parallel", "follows" = "tp_comm_overlap"))]
    pub tp_comm_overlap_num_splits: Option<usize>,
    /// The pipeline-parallel size: the number of ranks that share the layers.
    #[schemars(extend("flag" = "pp"))]
    pub pipeline: usize,
    /// The pipeline schedule: gpipe, 1f1b, eager-1f1b (1F1B with twice the number of warm-up micro-batches, which hides
    /// transfers), interleaved, interleaved:N (in groups of N micro-batches), zb-h1, zb-v, dualpipe-v, or the path of a
    /// CSV file. `None` means 1f1b.
    #[schemars(extend("flag" = "pipeline-schedule", "needs" = "pipeline > 1", "value" = "NAME|FILE.csv"))]
    pub schedule: Option<ScheduleSource>,
    /// The number of pipeline stages per pipeline rank. `None` means the default number of the schedule.
    #[schemars(extend("needs" = "pipeline > 1", "follows" = "schedule"))]
    pub virtual_stages: Option<usize>,
    /// The distribution of the layers over the pipeline stages.
    #[schemars(extend("needs" = "pipeline > 1"))]
    pub split: LayerSplit,
    /// The maximum number of output-layer weight gradients that the last stage defers to the cool-down phase. 0 means
    /// no limit. `None` disables deferral. Only for schedules that do not split the backward pass.
    #[schemars(extend("needs" = "pipeline > 1"))]
    pub defer_embedding_wgrad: Option<usize>,
    /// The number of receives from each pipeline neighbor that are posted before their position in the schedule. The
    /// default is [1](Self::RECEIVES_AHEAD).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("needs" = "pipeline > 1"))]
    pub receives_ahead: Option<usize>,
    /// Whether activations and their gradients are sent between stages in FP8.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("needs" = "pipeline > 1"))]
    pub fp8_transfers: bool,
    /// The context-parallel size: the number of ranks that share each sequence.
    #[serde(skip_serializing_if = "is_one")]
    #[schemars(extend("flag" = "cp"))]
    pub context: usize,
    /// The method that distributes the tokens of a sequence over the context-parallel ranks.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("needs" = "context > 1"))]
    pub context_split: ContextSplit,
    /// The method that exchanges keys and values between context-parallel ranks for attention. With `None`, the method
    /// is chosen from the sizes of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("needs" = "context > 1"))]
    pub context_exchange: Option<ContextExchange>,
    /// The number of ranks in each all-to-all group of the hierarchical context exchange.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("needs" = "context_exchange = hierarchical"))]
    pub context_inner: Option<usize>,
    /// Whether the gradients of keys and values are sent in the data type of the model instead of f32.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("needs" = "context > 1"))]
    pub context_narrow_gradients: bool,
    /// Whether hybrid context parallelism is enabled: the number of ranks that share a document depends on the length
    /// of the document. A short document is processed by one rank, a longer document by a group of 2, 4, ... ranks. The
    /// ranks of the context and data axes together process the documents of a step.
    #[serde(skip_serializing_if = "is_default")]
    pub hybrid_context_parallel: bool,
    /// The maximum number of tokens per rank in a micro-batch. Only for hybrid context parallelism.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("needs" = "hybrid_context_parallel"))]
    pub max_seqlen_per_dp_cp_rank: Option<usize>,
    /// The expert-parallel size: the number of ranks that share the experts.
    #[serde(skip_serializing_if = "is_one")]
    #[schemars(extend("flag" = "ep"))]
    pub expert: usize,
    /// The number of ranks that share each expert's weight matrices. `None` means the same number as `tensor`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("flag" = "etp"))]
    pub expert_tensor: Option<usize>,
    /// Whether the forward pass of one micro-batch runs concurrently with the backward pass of another micro-batch.
    /// While one of them exchanges tokens between expert-parallel ranks, the other one computes.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("needs" = "expert > 1"))]
    pub overlap_moe_expert_parallel_comm: bool,
    /// The order in which the axes number the ranks.
    #[serde(skip_serializing_if = "AxisOrder::is_default")]
    pub order: AxisOrder,
    /// The number of ranks per node. The ranks of a node must have consecutive numbers. `None` means that all ranks are
    /// on one node. If it is set, node-aware collectives send less data between nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks_per_node: Option<usize>,
    /// The ZeRO stage: the state that is sharded over the data axis. This field is not serialized. A recipe sets it in
    /// `[data_parallel]`.
    #[serde(skip)]
    pub zero_stage: ZeroStage,
    /// The number of ranks in each sharding group of hybrid sharding (HSDP) on the data axis. `None` means that the
    /// state is sharded over the whole axis. This field is not serialized. A recipe sets it in `[data_parallel]`.
    #[serde(skip)]
    pub hsdp: Option<usize>,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        ParallelConfig {
            tensor: 1,
            data: None,
            sequence_parallel: false,
            tp_comm_overlap: None,
            tp_comm_overlap_num_splits: None,
            pipeline: 1,
            schedule: None,
            virtual_stages: None,
            split: LayerSplit::Even,
            defer_embedding_wgrad: None,
            receives_ahead: None,
            fp8_transfers: false,
            context: 1,
            context_split: ContextSplit::default(),
            context_exchange: None,
            context_inner: None,
            context_narrow_gradients: false,
            hybrid_context_parallel: false,
            max_seqlen_per_dp_cp_rank: None,
            expert: 1,
            expert_tensor: None,
            overlap_moe_expert_parallel_comm: false,
            order: AxisOrder::default(),
            ranks_per_node: None,
            zero_stage: ZeroStage::Replicated,
            hsdp: None,
        }
    }
}

fn is_one(size: &usize) -> bool {
    *size == 1
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The error for a setting of a layout that conflicts with another setting or has no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Sequence parallelism is enabled without tensor parallelism.
    #[error(
        "sequence_parallel = true requires tensor parallelism, but tensor = 1: set tensor (--tp) to 2 or more, or \
         remove sequence_parallel"
    )]
    SequenceParallel,
    /// A setting of the tensor-parallel communication overlap is set without sequence parallelism.
    #[error(
        "{name} requires sequence parallelism: set sequence_parallel = true (--sp) and tensor (--tp) to 2 or more, or \
         remove {name}"
    )]
    NoSequenceParallel {
        /// The name of the setting.
        name: &'static str,
    },
    /// The number of overlap chunks is invalid for the overlap method.
    #[error(
        "tp_comm_overlap_num_splits = {splits} with tp_comm_overlap = {method}: expected at least 2 with bulk, at least 1 \
         with ring, and no number without overlap"
    )]
    NumSplits {
        /// The given number of chunks.
        splits: usize,
        /// The name of the overlap method, or `none`.
        method: String,
    },
    /// A pipeline setting is set without pipeline parallelism.
    #[error(
        "{name} requires pipeline parallelism, but pipeline = 1: set pipeline (--pp) to 2 or more, or remove {name}"
    )]
    NoPipeline {
        /// The name of the setting.
        name: &'static str,
    },
    /// The overlap of expert-parallel communication is enabled without expert parallelism.
    #[error(
        "overlap_moe_expert_parallel_comm requires expert parallelism, but expert = 1: set expert (--ep) to 2 or more, \
         or remove overlap_moe_expert_parallel_comm"
    )]
    NoExpertExchange,
    /// The overlap of expert-parallel communication is enabled with a schedule that cannot run the forward pass of one
    /// micro-batch together with the backward pass of another micro-batch.
    #[error(
        "overlap_moe_expert_parallel_comm requires a schedule that pairs forwards with backwards, and schedule = \
         {schedule} does not: expected 1f1b, interleaved or dualpipe-v, or a file with pairs (FB)"
    )]
    Unpaired {
        /// The pipeline schedule.
        schedule: ScheduleKind,
    },
    /// A context-parallel setting is set without context parallelism.
    #[error(
        "{name} requires context parallelism, but context = 1: set context (--cp) to 2 or more, or remove {name}"
    )]
    NoContext {
        /// The name of the setting.
        name: &'static str,
    },
    /// A setting of hybrid context parallelism is set, but hybrid context parallelism is disabled.
    #[error(
        "max_seqlen_per_dp_cp_rank requires hybrid context parallelism: set hybrid_context_parallel = true \
         (--parallel.hybrid_context_parallel), or remove max_seqlen_per_dp_cp_rank"
    )]
    NoHybridContext,
    /// A setting conflicts with hybrid context parallelism.
    #[error("hybrid_context_parallel conflicts with {setting}: expected {expected}")]
    HybridContext {
        /// The conflicting setting.
        setting: String,
        /// The valid values of the setting.
        expected: String,
    },
    /// The number of ranks per node is 0.
    #[error("invalid ranks_per_node = 0: expected at least 1, or none for one node")]
    EmptyNode,
    /// Only one of `context_inner` and the hierarchical context exchange is set, or `context_inner` is invalid.
    #[error(
        "context_inner = {inner} and context_exchange = {exchange}: a hierarchical exchange requires both, and a \
         context_inner that divides context = {context} and is neither 1 nor {context}{}",
        fitting_inner(*context)
    )]
    ContextInner {
        /// The number of ranks in each inner group, or `none`.
        inner: String,
        /// The name of the context exchange, or `none`.
        exchange: String,
        /// The size of the context axis.
        context: usize,
    },
}

fn or_none(text: Option<String>) -> String {
    text.unwrap_or_else(|| "none".into())
}

/// Lists the valid inner group sizes of a context axis as text.
fn fitting_inner(context: usize) -> String {
    let fits = (2..context).filter(|size| context.is_multiple_of(*size));
    let fits: Vec<_> = fits.map(|size| size.to_string()).collect();
    match fits.as_slice() {
        [] => format!(", which {context} does not have"),
        fits => format!(": {}", fits.join(", ")),
    }
}

impl ParallelConfig {
    /// The default value of [`receives_ahead`](field@Self::receives_ahead).
    pub const RECEIVES_AHEAD: usize = 1;

    /// Creates a layout in which every size is 1, except that data parallelism uses all ranks of the world.
    pub fn new() -> Self {
        Self::default()
    }

    /// Checks that no setting conflicts with another setting or has no effect. [`Mesh::new`](super::Mesh::new) calls
    /// this method and also checks the sizes.
    ///
    /// ```
    /// use burn_megatron_comm::mesh::{LayoutError, ParallelConfig};
    ///
    /// let config = ParallelConfig::new().with_tensor(2).with_sequence_parallel(true);
    /// config.check()?;
    /// // Sequence parallelism requires tensor parallelism.
    /// let error = config.with_tensor(1).check().unwrap_err();
    /// assert_eq!(error, LayoutError::SequenceParallel);
    /// # Ok::<(), LayoutError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`LayoutError`] for the first invalid setting.
    pub fn check(&self) -> Result<(), LayoutError> {
        if self.sequence_parallel && self.tensor == 1 {
            return Err(LayoutError::SequenceParallel);
        }
        if self.ranks_per_node == Some(0) {
            return Err(LayoutError::EmptyNode);
        }
        self.check_tp_comm_overlap()?;
        self.check_moe_overlap()?;
        let pipeline_settings = [
            ("schedule", self.schedule.is_some()),
            ("virtual_stages", self.virtual_stages.is_some()),
            ("split", self.split != LayerSplit::Even),
            (
                "defer_embedding_wgrad",
                self.defer_embedding_wgrad.is_some(),
            ),
            ("receives_ahead", self.receives_ahead.is_some()),
            ("fp8_transfers", self.fp8_transfers),
        ];
        match pipeline_settings.into_iter().find(|(_, is_set)| *is_set) {
            Some((name, _)) if self.pipeline == 1 => Err(LayoutError::NoPipeline { name }),
            _ => self
                .check_context()
                .and_then(|()| self.check_hybrid_context()),
        }
    }

    fn check_hybrid_context(&self) -> Result<(), LayoutError> {
        if !self.hybrid_context_parallel {
            return match self.max_seqlen_per_dp_cp_rank {
                Some(_) => Err(LayoutError::NoHybridContext),
                None => Ok(()),
            };
        }
        let order = self.order.completed();
        let place = |axis| order.axes().iter().position(|of| *of == axis);
        let refused = [
            (
                self.max_seqlen_per_dp_cp_rank.is_none(),
                "max_seqlen_per_dp_cp_rank = none".to_string(),
                "the maximum number of tokens per rank in a micro-batch (--parallel.max_seqlen_per_dp_cp_rank)",
            ),
            (
                self.pipeline > 1,
                format!("pipeline = {}", self.pipeline),
                "1, because the number of micro-batches differs between steps",
            ),
            (
                self.expert > 1,
                format!("expert = {}", self.expert),
                "1, because the ranks of an expert group have different micro-batches",
            ),
            (
                matches!(
                    self.context_exchange,
                    Some(ContextExchange::AllToAll | ContextExchange::Hierarchical)
                ),
                format!(
                    "context_exchange = {}",
                    or_none(self.context_exchange.map(|it| it.to_string()))
                ),
                "ring or all-gather, which support groups of all sizes",
            ),
            (
                matches!(
                    self.context_split,
                    ContextSplit::Contiguous | ContextSplit::Striped
                ),
                format!("context_split = {}", self.context_split),
                "zigzag or zigzag-per-document, because each document is split as a zigzag",
            ),
            (
                self.context > 1 && place(Axis::Data) < place(Axis::Context),
                format!("order = {}", self.order),
                "cp before dp, so that the ranks of a context group have consecutive numbers",
            ),
        ];
        let refused = refused.into_iter().find(|(is_set, ..)| *is_set);
        refused.map_or(Ok(()), |(_, setting, expected)| {
            let expected = expected.into();
            Err(LayoutError::HybridContext { setting, expected })
        })
    }

    fn check_moe_overlap(&self) -> Result<(), LayoutError> {
        if !self.overlap_moe_expert_parallel_comm {
            return Ok(());
        }
        match self.schedule {
            _ if self.expert == 1 => Err(LayoutError::NoExpertExchange),
            Some(ScheduleSource::Kind(schedule)) if !schedule.has_pairs() => {
                Err(LayoutError::Unpaired { schedule })
            }
            _ => Ok(()),
        }
    }

    fn check_tp_comm_overlap(&self) -> Result<(), LayoutError> {
        if self.tp_comm_overlap.is_some() && !self.sequence_parallel {
            let name = "tp_comm_overlap";
            return Err(LayoutError::NoSequenceParallel { name });
        }
        let Some(splits) = self.tp_comm_overlap_num_splits else {
            return Ok(());
        };
        match self.tp_comm_overlap {
            Some(TpCommOverlap::Bulk) if splits >= 2 => Ok(()),
            Some(TpCommOverlap::Ring) if splits >= 1 => Ok(()),
            method => Err(LayoutError::NumSplits {
                splits,
                method: or_none(method.map(|method| method.to_string())),
            }),
        }
    }

    fn check_context(&self) -> Result<(), LayoutError> {
        let settings = [
            ("context_split", !is_default(&self.context_split)),
            ("context_exchange", self.context_exchange.is_some()),
            ("context_inner", self.context_inner.is_some()),
            ("context_narrow_gradients", self.context_narrow_gradients),
        ];
        if let Some((name, _)) = settings.into_iter().find(|(_, is_set)| *is_set)
            && self.context == 1
            && !self.hybrid_context_parallel
        {
            return Err(LayoutError::NoContext { name });
        }
        let is_hierarchical = self.context_exchange == Some(ContextExchange::Hierarchical);
        let fits = match self.context_inner {
            None => !is_hierarchical,
            Some(inner) => {
                is_hierarchical
                    && (2..self.context).contains(&inner)
                    && self.context.is_multiple_of(inner)
            }
        };
        if fits {
            return Ok(());
        }
        Err(LayoutError::ContextInner {
            inner: or_none(self.context_inner.map(|inner| inner.to_string())),
            exchange: or_none(self.context_exchange.map(|exchange| exchange.to_string())),
            context: self.context,
        })
    }

    /// Returns the number of receives from each pipeline neighbor that are posted before their position in the
    /// schedule. Returns 0 without pipeline parallelism.
    pub fn receives_ahead(&self) -> usize {
        match self.pipeline {
            1 => 0,
            _ => self.receives_ahead.unwrap_or(Self::RECEIVES_AHEAD),
        }
    }

    /// Returns the maximum number of tokens per rank in a micro-batch of hybrid context parallelism. Returns `None` if
    /// hybrid context parallelism is disabled.
    pub fn hybrid_tokens(&self) -> Option<usize> {
        self.max_seqlen_per_dp_cp_rank
            .filter(|_| self.hybrid_context_parallel)
    }

    /// Returns whether a sequence may be split over several ranks of the context and data axes.
    pub fn shares_sequences(&self) -> bool {
        self.context > 1 || self.hybrid_context_parallel
    }

    /// Returns a copy of this layout without context parallelism: the ranks of the context axis are added to the data
    /// axis, so each rank processes complete sequences.
    pub fn with_whole_sequences(self) -> Self {
        Self {
            data: Some(self.data_parallel_size()),
            context: 1,
            context_split: ContextSplit::default(),
            context_exchange: None,
            context_inner: None,
            context_narrow_gradients: false,
            hybrid_context_parallel: false,
            max_seqlen_per_dp_cp_rank: None,
            ..self
        }
    }
}
