//! The flags of `checkpoint`.

use std::path::PathBuf;

use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron_models::MoeConfig;
use burn_megatron_models::upcycle::UpcycleConfig;
use clap::{Args, Subcommand, ValueEnum};

use crate::byte_size::ByteSize;

/// Commands for checkpoints. PATH is a checkpoint, a folder of checkpoints, or a run folder. The latest checkpoint of
/// a folder is used.
#[derive(Subcommand)]
pub enum CheckpointCommand {
    /// Show the metadata and the contents of a checkpoint.
    Inspect(InspectArgs),
    /// Compare all tensors and objects of two checkpoints, with any sharding.
    ///
    /// The exit code is 0 if they are equal bit for bit, 1 if they differ, and 2 if a checkpoint cannot be read.
    Diff(DiffArgs),
    /// Write a checkpoint to another folder with unsharded tensors, in one file or more.
    ///
    /// Every tensor is stored under its key in safetensors files, which other programs can read. The result is
    /// compared with the source.
    Reshard(ReshardArgs),
    /// Verify the checksums of all files of a checkpoint.
    ///
    /// The exit code is 1 if a file has changed since it was written.
    Verify(VerifyArgs),
    /// Turn a dense model into a model with experts that initially computes the same outputs (upcycling).
    ///
    /// Each MLP is cut into G slices of its width, and each slice is repeated E / G times, which gives E experts. The
    /// router has random weights whose scores are equal for the slices of one copy. If the outputs differ from the
    /// dense model, the difference is printed. The new checkpoint is at step 0 and holds only weights: start a run
    /// with `pretrain --load`.
    Upcycle(UpcycleArgs),
}

/// Flags of `checkpoint inspect`.
#[derive(Args)]
pub struct InspectArgs {
    /// The checkpoint.
    pub path: PathBuf,
    /// List each tensor with its type, shape, number of bytes and pieces.
    #[arg(long)]
    pub tensors: bool,
    /// Print JSON, with the recipe and the state of the run.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `checkpoint diff`.
#[derive(Args)]
pub struct DiffArgs {
    /// The first checkpoint.
    #[arg(value_name = "A")]
    pub first: PathBuf,
    /// The second checkpoint.
    #[arg(value_name = "B")]
    pub second: PathBuf,
}

/// Flags of `checkpoint reshard`.
#[derive(Args)]
pub struct ReshardArgs {
    /// The checkpoint.
    #[arg(value_name = "SRC")]
    pub path: PathBuf,
    /// Folder of checkpoints to write the new checkpoint to; created if missing.
    #[arg(value_name = "DST")]
    pub to: PathBuf,
    /// Number of files. Their sizes are as equal as possible without splitting a tensor.
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value = "1")]
    pub files: usize,
    /// Maximum bytes of tensors per file, such as 5GB or 512MiB. A larger tensor gets a separate file.
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
    /// Folder of checkpoints to write the new checkpoint to; it must be empty or missing.
    #[arg(value_name = "DST")]
    pub to: PathBuf,
    /// The number of experts: a multiple of the granularity.
    #[arg(long, value_name = "E", value_parser = at_least_one)]
    pub experts: usize,
    /// The number of slices per MLP, which must divide its width. With 1, each expert is a full copy of the MLP.
    #[arg(long, value_name = "G", default_value = "1", value_parser = at_least_one)]
    pub granularity: usize,
    /// The number of experts per token. A multiple of the granularity keeps the outputs unchanged.
    #[arg(short = 'k', long, value_name = "K", value_parser = at_least_one)]
    pub experts_per_token: usize,
    /// The function from scores to weights. All choices except pre-softmax keep the outputs unchanged.
    #[arg(long, value_enum, default_value_t = Score::Softmax)]
    pub score: Score,
    /// The interval between blocks with experts: 1 for every block.
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    pub every: usize,
    /// The number of blocks at the start that stay dense.
    #[arg(long, value_name = "N", default_value = "0")]
    pub first_dense: usize,
    /// The seed of the router weights.
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
