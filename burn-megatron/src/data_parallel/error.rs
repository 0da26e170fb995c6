//! The errors of data parallelism.

use super::config::DataParallelConfigError;
use super::layout::LayoutError;
use super::memory::MemoryError;
use crate::comm::CommError;
use crate::glob::{GlobError, listed};
use crate::nn::fp8::Fp8Error;
use crate::nn::{BuildError, RecomputeError};

/// The error of a data-parallel wrapper or step.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DataParallelError {
    /// The model does not have the layers that are to have adapters.
    #[error(transparent)]
    Lora(Box<BuildError>),
    /// An invalid pattern of frozen parameters.
    #[error("invalid freeze pattern `{pattern}`: {fault}")]
    FreezePattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        fault: GlobError,
    },
    /// A pattern of frozen parameters that matches none of any stage.
    #[error("the freeze pattern `{pattern}` matches no parameter{}", listed(.nearest))]
    FreezeUnmatched {
        /// The pattern.
        pattern: String,
        /// The paths nearest to it, the nearest first.
        nearest: Vec<String>,
    },
    /// Every parameter of the model is frozen.
    #[error("freeze leaves no parameter that is trained: give patterns that match fewer")]
    AllFrozen,
    /// Invalid settings.
    #[error(transparent)]
    Config(#[from] DataParallelConfigError),
    /// The buffers cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The memory cannot be computed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Invalid FP8 layers.
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    /// Settings of recomputation that the model cannot follow.
    #[error(transparent)]
    Recompute(#[from] RecomputeError),
    /// The threads that step offloaded buckets cannot be started.
    #[error("cannot start the threads that step optimizer state on the host: {reason}")]
    HostThreads {
        /// The error of the system.
        reason: String,
    },
    /// A parameter of a dtype that cannot be trained.
    #[error("{path} has the dtype {dtype}, expected f64, f32, bf16 or f16")]
    Type {
        /// The parameter.
        path: String,
        /// Its dtype.
        dtype: String,
    },
    /// A forward was not followed by its backward.
    #[error("{path} was used {uses} times in a forward whose backward did not run")]
    NoBackward {
        /// The parameter.
        path: String,
        /// Uses whose gradient is pending.
        uses: usize,
    },
    /// A rank ran no micro-batch in a stage that reduces after each.
    #[error(
        "this rank ran no micro-batch, but with zero_stage = {stage} all ranks must run the same number, as \
         gradients are reduced after each; run one with a loss of 0, or use zero_stage 0 or 1"
    )]
    NoMicroBatches {
        /// The stage.
        stage: super::memory::ZeroStage,
    },
    /// The ranks of the data axis used the parameters in different orders.
    #[error(
        "rank {rank} and rank {other} used the parameters of the model in different orders in this step; \
         with zero_stage = {stage} the order must be the same on all ranks"
    )]
    OrderMismatch {
        /// This rank.
        rank: usize,
        /// A rank that differs.
        other: usize,
        /// The stage.
        stage: super::memory::ZeroStage,
    },
    /// A parameter that is tied across the pipeline is on a rank whose gradients are not summed.
    #[error(
        "{path} is tied across the first and the last stage, but is on rank {rank} of a pipeline of {ranks}: \
         its gradients are summed over rank 0 and rank {} only; use a schedule with both stages on these \
         ranks or on one rank, or an output that is not tied",
        ranks - 1
    )]
    TiedParameterPlacement {
        /// The parameter.
        path: String,
        /// The rank of the pipeline axis that holds it.
        rank: usize,
        /// The ranks of the pipeline.
        ranks: usize,
    },
    /// A layout that splits experts, for a model without them.
    #[error(
        "invalid expert = {expert} or expert_tensor = {expert_tensor}: expected expert = 1 and no expert_tensor, as \
         this model has no experts"
    )]
    NoExperts {
        /// The ranks of the expert axis.
        expert: usize,
        /// The ranks of the expert-tensor axis.
        expert_tensor: usize,
    },
    /// The ranks of a stage have different models.
    #[error(
        "rank {rank} and rank {other} have different parameters: the models were built differently"
    )]
    ModelMismatch {
        /// This rank.
        rank: usize,
        /// A rank that differs.
        other: usize,
    },
    /// The replicas of a parameter differ.
    #[error("the replicas of {path} differ on ranks {} and {}", ranks[0], ranks[1])]
    ReplicaMismatch {
        /// The parameter.
        path: String,
        /// Two world ranks whose replicas differ.
        ranks: [usize; 2],
    },
    /// Gradients whose sizes are not those of the parameters.
    #[error("{found} elements were given for {path}, expected {expected} on this rank")]
    ElementCount {
        /// The parameter.
        path: String,
        /// The elements that were given.
        found: usize,
        /// The elements of the parameter.
        expected: usize,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for DataParallelError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
