//! The flags of `checkpoint`.

use std::path::PathBuf;

use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron_models::MoeConfig;
use burn_megatron_models::upcycle::UpcycleConfig;
use clap::{Args, Subcommand, ValueEnum};

use crate::byte_size::ByteSize;

/// Commands for checkpoints. PATH is a checkpoint, or a folder of checkpoints or of a run, whose latest is used.
#[derive(Subcommand)]
pub enum CheckpointCommand {
    /// Show the metadata and the contents of a checkpoint.
    Inspect(InspectArgs),
    /// Compare all tensors and objects of two checkpoints, however they are sharded.
    ///
    /// Exits with 0 if they are equal bit for bit, with 1 if not, with 2 if one cannot be read.
    Diff(DiffArgs),
    /// Write a checkpoint to another folder with unsharded tensors, in one file or more.
    ///
    /// Every tensor is in the safetensors files under its key, for other programs to read. The result is
    /// compared with the source.
    Reshard(ReshardArgs),
    /// Verify the checksums of all files of a checkpoint.
    ///
    /// Exits with 1 if anything has changed since it was written.
    Verify(VerifyArgs),
    /// Turn a dense model into one with experts, which computes the same before its first step (upcycling).
    ///
    /// Each MLP is cut into G slices of its width, and each slice is repeated E / G times: so many experts, and a
    /// router with random weights whose scores are equal for the slices of one copy. Where the outputs differ, it says
    /// how. The new checkpoint is at step 0 and has weights only: start a run with `pretrain --load`.
    Upcycle(UpcycleArgs),
}

/// Flags of `checkpoint inspect`.
#[derive(Args)]
pub struct InspectArgs {
    /// The checkpoint.
    pub path: PathBuf,
    /// List each tensor: type, shape, bytes, pieces.
    #[arg(long)]
    pub tensors: bool,
    /// Print everything as JSON, with the recipe and the state of the run.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `checkpoint diff`.
#[derive(Args)]
pub struct DiffArgs {
    /// A checkpoint.
    #[arg(value_name = "A")]
    pub first: PathBuf,
    /// Another one.
    #[arg(value_name = "B")]
    pub second: PathBuf,
}

/// Flags of `checkpoint reshard`.
#[derive(Args)]
pub struct ReshardArgs {
    /// The checkpoint.
    #[arg(value_name = "SRC")]
    pub path: PathBuf,
    /// Folder of checkpoints to write the new one to; created if missing.
    #[arg(value_name = "DST")]
    pub to: PathBuf,
    /// Number of files, of sizes as equal as whole tensors allow.
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value = "1")]
    pub files: usize,
    /// Maximum bytes of tensors per file instead, such as 5GB or 512MiB; a larger tensor gets a file of its own.
    #[arg(long, value_name = "SIZE", conflicts_with = "files")]
    pub max_shard_size: Option<ByteSize>,
}

/// Flags of `checkpoint verify`.
#[derive(Args)]
pub struct VerifyArgs {
    /// The checkpoint.
    pub path: PathBuf,
}

/// Flags of `checkpoint upcycle`.
#[derive(Args)]
pub struct UpcycleArgs {
    /// The checkpoint of a dense model.
    #[arg(value_name = "SRC")]
    pub path: PathBuf,
    /// Folder of checkpoints to write the new one to; it must be empty or missing.
    #[arg(value_name = "DST")]
    pub to: PathBuf,
    /// The number of experts: a multiple of the granularity.
    #[arg(long, value_name = "E", value_parser = at_least_one)]
    pub experts: usize,
    /// The number of slices of an MLP, which divides its width. With 1 each expert is a whole copy.
    #[arg(long, value_name = "G", default_value = "1", value_parser = at_least_one)]
    pub granularity: usize,
    /// The number of experts per token. Outputs stay the same for a multiple of the granularity.
    #[arg(short = 'k', long, value_name = "K", value_parser = at_least_one)]
    pub experts_per_token: usize,
    /// The function from scores to weights. Outputs stay the same with all but pre-softmax.
    #[arg(long, value_enum, default_value_t = Score::Softmax)]
    pub score: Score,
    /// Give experts to every so many blocks.
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    pub every: usize,
    /// Leave so many blocks at the start as they are.
    #[arg(long, value_name = "N", default_value = "0")]
    pub first_dense: usize,
    /// The seed of the router's weights.
    #[arg(long, default_value = "0")]
    pub seed: u64,
}

impl UpcycleArgs {
    /// Returns the configuration of upcycling.
    pub fn config(&self) -> UpcycleConfig {
        UpcycleConfig {
            moe: MoeConfig {
                experts: self.experts,
                experts_per_token: self.experts_per_token,
                score: self.score.into(),
                every: self.every,
                first_dense: self.first_dense,
                ..MoeConfig::default()
            },
            granularity: self.granularity,
            seed: self.seed,
        }
    }
}

/// Score functions; see [`ScoreFunction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Score {
    /// Softmax over the chosen experts.
    Softmax,
    /// Softmax over all experts.
    PreSoftmax,
    /// Sigmoids, divided by their sum over the chosen experts.
    Sigmoid,
    /// Square roots of softplus, divided by their sum over the chosen experts.
    SqrtSoftplus,
}

impl From<Score> for ScoreFunction {
    fn from(score: Score) -> Self {
        match score {
            Score::Softmax => Self::Softmax,
            Score::PreSoftmax => Self::PreSoftmax,
            Score::Sigmoid => Self::Sigmoid,
            Score::SqrtSoftplus => Self::SqrtSoftplus,
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("expected at least 1".into()),
        Ok(files) => Ok(files),
        Err(error) => Err(format!("{error}")),
    }
}
