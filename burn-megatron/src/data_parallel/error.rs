//! What data parallelism can fail with.

use super::config::DataParallelConfigError;
use super::layout::LayoutError;
use super::memory::MemoryError;
use crate::comm::CommError;
use crate::nn::fp8::Fp8Error;

/// What a data-parallel step can fail with.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DataParallelError {
    /// Settings that do not fit.
    #[error(transparent)]
    Config(#[from] DataParallelConfigError),
    /// Buffers that cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Memory that cannot be counted.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// 8-bit layers that do not fit the model.
    #[error(transparent)]
    Fp8(#[from] Fp8Error),
    /// A parameter of a type that cannot be trained.
    #[error("{path} is {dtype}, which cannot be trained; f64, f32, bf16 and f16 can")]
    Type {
        /// The parameter.
        path: String,
        /// Its type.
        dtype: String,
    },
    /// A forward was not followed by its backward.
    #[error("{path} was used {uses} times in a forward whose backward did not run")]
    NoBackward {
        /// The parameter.
        path: String,
        /// How many uses are open.
        uses: usize,
    },
    /// A rank sat out a step in which every rank is needed.
    #[error(
        "this rank ran no micro-batch, and with zero_stage = {stage} every rank runs as many as the \
         others: its gradients are summed after each; give it one whose loss counts nothing, or use \
         zero_stage 0 or 1"
    )]
    SatOut {
        /// The stage.
        stage: super::memory::ZeroStage,
    },
    /// The ranks of the data axis did not run the same.
    #[error(
        "rank {rank} and rank {other} used the blocks of the model in different orders in this step; \
         with zero_stage = {stage} all ranks must use them in the same"
    )]
    OtherOrder {
        /// This rank.
        rank: usize,
        /// A rank that differs.
        other: usize,
        /// The stage.
        stage: super::memory::ZeroStage,
    },
    /// A weight that two stages share lies where no sum reaches it.
    #[error(
        "{path} is shared by the first and the last stage, and lies on rank {rank} of a pipeline of \
         {ranks}: its gradients are summed between rank 0 and rank {}; a schedule that puts both \
         stages there, or on one rank, can train it, or an output that is not tied",
        ranks - 1
    )]
    NotAtTheEnds {
        /// The parameter.
        path: String,
        /// The rank of the pipeline axis that holds it.
        rank: usize,
        /// The ranks of the pipeline.
        ranks: usize,
    },
    /// The ranks of the data axis hold different models.
    #[error(
        "rank {rank} and rank {other} hold other parameters: the models were built differently"
    )]
    OtherModel {
        /// This rank.
        rank: usize,
        /// A rank that differs.
        other: usize,
    },
    /// Replicas have drifted apart.
    #[error("{path} is not the same on ranks {} and {}", ranks[0], ranks[1])]
    Drifted {
        /// The parameter.
        path: String,
        /// Two world ranks that hold the same part of it with other bits.
        ranks: [usize; 2],
    },
    /// Gradients that do not fit the parameters.
    #[error("{found} elements were given for {path}, which has {expected} on this rank")]
    Elements {
        /// The parameter.
        path: String,
        /// The elements of what was given.
        found: usize,
        /// The elements of the parameter.
        expected: usize,
    },
    /// The ranks could not communicate.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<CommError> for DataParallelError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
