//! The errors of data parallelism.

use super::layout::LayoutError;
use super::precision::Precision;
use crate::comm::CommError;
use crate::glob::{GlobError, listed};
use crate::mesh::ZeroStage;
use crate::nn::fp8::Fp8Error;
use crate::nn::{BuildError, RecomputeError};

/// The settings of data parallelism are invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DataParallelConfigError {
    /// The number of ranks in a shard group does not divide the number of ranks of the data axis.
    #[error(
        "invalid hsdp = {hsdp}: expected a divisor of the {ranks} ranks of the data axis ({divisors})"
    )]
    Hsdp {
        /// The number of ranks in a shard group.
        hsdp: usize,
        /// The number of ranks of the data axis.
        ranks: usize,
        /// The divisors of the number of ranks, as a list for the message.
        divisors: String,
    },
    /// A setting has no effect in the ZeRO stage of the run.
    #[error(
        "{name} requires zero_stage = {expected}, but zero_stage = {stage}; change the stage, or remove {name}"
    )]
    RequiresZeroStage {
        /// The name of the setting.
        name: &'static str,
        /// The ZeRO stages in which the setting has an effect.
        expected: &'static str,
        /// The ZeRO stage of the run.
        stage: ZeroStage,
    },
    /// A hierarchical reduction was requested for sharded gradients.
    #[error(
        "hierarchical_reduce requires replicated gradients, but zero_stage = {stage} shards them; set hsdp to the \
         ranks of a node to exchange less between nodes, or remove hierarchical_reduce"
    )]
    HierarchicalShards {
        /// The ZeRO stage of the run.
        stage: ZeroStage,
    },
    /// A setting has different values in [`DataParallelConfig`](super::DataParallelConfig) and in the layout.
    #[error("{name} = {own}, but {name} = {layout} in the layout: set it in one place")]
    Contradiction {
        /// The name of the setting.
        name: &'static str,
        /// The value in [`DataParallelConfig`](super::DataParallelConfig).
        own: String,
        /// The value in the layout.
        layout: String,
    },
    /// A setting for 16-bit models was used with a precision that is not 16-bit.
    #[error(
        "reduce_in_16_bits requires precision = bf16 or f16, but precision = {0}; change the precision, or remove \
         reduce_in_16_bits"
    )]
    NotHalfPrecision(Precision),
    /// The precision is `f64`, but the device of the model is not the CPU.
    #[error(
        "invalid precision = f64 for a model on {device}: expected f32, bf16 or f16, or a model on the CPU"
    )]
    F64Device {
        /// The device of the model.
        device: String,
    },
    /// `fp8_param_gather` was set, but shard groups have one rank, so no parameters are gathered.
    #[error(
        "fp8_param_gather requires shard groups of 2 or more ranks, but the data axis has {ranks} ranks and hsdp = {}; \
         shard over more ranks, or remove fp8_param_gather",
        hsdp.unwrap_or(*ranks)
    )]
    NothingToGather {
        /// The number of ranks of the data axis.
        ranks: usize,
        /// The number of ranks in a shard group, if set.
        hsdp: Option<usize>,
    },
    /// `fp8_param_gather` was set for a model without FP8 weights.
    #[error(
        "fp8_param_gather requires FP8 layers other than experts, but the model has none; choose an FP8 recipe, or \
         remove fp8_param_gather"
    )]
    NoFp8Weights,
    /// An FP8 layer gives a path for its weight, but the model has no matrix with this path.
    #[error(
        "the model has no matrix {path}, the path of the weight of an FP8 layer; with fp8_param_gather build the layer \
         with its path in the model"
    )]
    UnknownWeight {
        /// The path of the weight.
        path: String,
    },
    /// The offload settings are invalid.
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// A setting must be positive, but its value is not.
    #[error("invalid {name} = {value}: expected a number above 0")]
    NotPositive {
        /// The name of the setting.
        name: &'static str,
        /// The value of the setting.
        value: f64,
    },
}

/// The offload settings are invalid.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum OffloadError {
    /// The fraction is not between 0 and 1.
    #[error("invalid offload.optimizer = {0}: expected a fraction from 0 to 1")]
    Fraction(f64),
    /// The master weights would be in host memory, but the device needs them because of `fp8_param_gather`.
    #[error(
        "offload.optimizer = {0} conflicts with fp8_param_gather, which quantises the masters on the device in every \
         step: remove one of them"
    )]
    Fp8(f64),
}

/// The memory cannot be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The number of bytes overflows a `u64`.
    #[error(
        "the state of one rank takes {bytes} bytes, which overflows 64 bits; split the model over more ranks"
    )]
    Overflow {
        /// The total number of bytes.
        bytes: u128,
    },
}

/// An error of a data-parallel wrapper or of a training step.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DataParallelError {
    /// Adapters were requested for layers that the model does not have.
    #[error(transparent)]
    Lora(Box<BuildError>),
    /// An invalid pattern of frozen parameters.
    #[error("invalid freeze pattern `{pattern}`: {fault}")]
    FreezePattern {
        /// The pattern.
        pattern: String,
        /// The syntax error of the pattern.
        fault: GlobError,
    },
    /// A freeze pattern does not match any parameter of any pipeline stage.
    #[error("the freeze pattern `{pattern}` matches no parameter{}", listed(.nearest))]
    FreezeUnmatched {
        /// The pattern.
        pattern: String,
        /// The parameter paths that are most similar to the pattern, most similar first.
        nearest: Vec<String>,
    },
    /// Every parameter of the model is frozen.
    #[error("freeze leaves no parameter that is trained: give patterns that match fewer")]
    AllFrozen,
    /// The settings of data parallelism are invalid.
    #[error(transparent)]
    Config(#[from] DataParallelConfigError),
    /// The layout of the buffers cannot be computed.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The memory cannot be computed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The FP8 layers are invalid.
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    /// The recomputation settings are invalid for the model.
    #[error(transparent)]
    Recompute(#[from] RecomputeError),
    /// The host threads that run the optimizer steps of offloaded buckets cannot be started.
    #[error("cannot start the threads that step optimizer state on the host: {reason}")]
    HostThreads {
        /// The error of the operating system.
        reason: String,
    },
    /// A parameter has a dtype that cannot be trained.
    #[error("{path} has the dtype {dtype}, expected f64, f32, bf16 or f16")]
    Type {
        /// The path of the parameter.
        path: String,
        /// The dtype of the parameter.
        dtype: String,
    },
    /// A parameter was used in a forward that was not followed by a backward.
    #[error("{path} was used {uses} times in a forward whose backward did not run")]
    NoBackward {
        /// The path of the parameter.
        path: String,
        /// The number of uses of the parameter for which no gradient was received.
        uses: usize,
    },
    /// A rank ran no micro-batch, but its ZeRO stage reduces gradients after each micro-batch.
    #[error(
        "this rank ran no micro-batch, but with zero_stage = {stage} all ranks must run the same number, because \
         gradients are reduced after each micro-batch; run one with a loss of 0, or use zero_stage 0 or 1"
    )]
    NoMicroBatches {
        /// The ZeRO stage.
        stage: ZeroStage,
    },
    /// The ranks of the data axis used the parameters in different orders.
    #[error(
        "rank {rank} and rank {other} used the parameters of the model in different orders in this step; \
         with zero_stage = {stage} the order must be the same on all ranks"
    )]
    OrderMismatch {
        /// This rank.
        rank: usize,
        /// Another rank, which used the parameters in a different order.
        other: usize,
        /// The ZeRO stage.
        stage: ZeroStage,
    },
    /// A parameter that is tied across the pipeline is on a rank other than the first and the last rank of the
    /// pipeline. The gradients of such a rank are not summed.
    #[error(
        "{path} is tied across the first and the last stage, but is on rank {rank} of a pipeline of {ranks}: \
         its gradients are summed over rank 0 and rank {} only; use a schedule with both stages on these \
         ranks or on one rank, or an output that is not tied",
        ranks - 1
    )]
    TiedParameterPlacement {
        /// The path of the parameter.
        path: String,
        /// The rank on the pipeline axis that holds the parameter.
        rank: usize,
        /// The number of pipeline ranks.
        ranks: usize,
    },
    /// The layout splits experts, but the model has no experts.
    #[error(
        "invalid expert = {expert} or expert_tensor = {expert_tensor}: expected expert = 1 and no expert_tensor, \
         because this model has no experts"
    )]
    NoExperts {
        /// The number of ranks of the expert axis.
        expert: usize,
        /// The number of ranks of the expert-tensor axis.
        expert_tensor: usize,
    },
    /// The ranks of a pipeline stage have different models.
    #[error(
        "rank {rank} and rank {other} have different parameters: the models were built differently"
    )]
    ModelMismatch {
        /// This rank.
        rank: usize,
        /// Another rank, whose parameters differ.
        other: usize,
    },
    /// The replicas of a parameter differ.
    #[error("the replicas of {path} differ on ranks {} and {}", ranks[0], ranks[1])]
    ReplicaMismatch {
        /// The path of the parameter.
        path: String,
        /// Two world ranks whose replicas differ.
        ranks: [usize; 2],
    },
    /// A gradient has a different number of elements than its parameter.
    #[error("{found} elements were given for {path}, expected {expected} on this rank")]
    ElementCount {
        /// The path of the parameter.
        path: String,
        /// The number of elements of the gradient.
        found: usize,
        /// The number of elements of the parameter.
        expected: usize,
    },
    /// The broadcast of the initial value of a parameter failed.
    #[error("the initial value of {path} was not broadcast: {error}")]
    Broadcast {
        /// The path of the parameter.
        path: String,
        /// The error of the broadcast.
        error: Box<CommError>,
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
