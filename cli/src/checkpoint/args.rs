//! The flags of `checkpoint`.

use std::path::PathBuf;

use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron_models::MoeConfig;
use burn_megatron_models::upcycle::UpcycleConfig;
use clap::{Args, Subcommand, ValueEnum};

use crate::byte_size::ByteSize;

/// Commands for checkpoints. PATH is a checkpoint, a folder of checkpoints, or a run folder. For a folder, its latest
/// checkpoint is used.
#[derive(Subcommand)]
pub enum CheckpointCommand {
    /// Show the metadata and the contents of a checkpoint.
    Inspect(InspectArgs),
    /// Compare all tensors and objects of two checkpoints, which may be sharded differently.
    ///
    /// The exit code is 0 if the checkpoints are equal bit for bit, 1 if they differ, and 2 if a checkpoint cannot be
    /// read.
    Diff(DiffArgs),
    /// Convert a checkpoint to unsharded tensors, and write it to another folder in one or more files.
    ///
    /// The tensors are written to safetensors files, which other programs can read. The name of each tensor is its key
    /// in the checkpoint. The new checkpoint is compared with the source.
    Reshard(ReshardArgs),
    /// Verify the checksums of all files of a checkpoint.
    ///
    /// The exit code is 1 if a file has changed since it was written.
    Verify(VerifyArgs),
    /// Convert a dense model to a mixture-of-experts model that initially computes the same outputs (upcycling).
    ///
    /// Each MLP is split along its width into G slices, and each slice is copied E / G times, which gives E experts.
    /// The weights of the router are random, but the experts of one copy of the MLP have equal scores. If the settings
    /// change the outputs of the model, the difference is printed. The new checkpoint is at step 0 and contains only
    /// weights. Start a run from it with `pretrain --load`.
    Upcycle(UpcycleArgs),
}

/// Flags of `checkpoint inspect`.
#[derive(Args)]
pub struct InspectArgs {
    /// The checkpoint.
    pub path: PathBuf,
    /// List each tensor with its dtype, its shape, its size in bytes, and its number of shards.
    #[arg(long)]
    pub tensors: bool,
    /// Print JSON, which includes the recipe and the state of the run.
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
    /// Folder of checkpoints to which the new checkpoint is written. It is created if it does not exist.
    #[arg(value_name = "DST")]
    pub to: PathBuf,
    /// Number of files to write. The tensors are distributed so that the files have similar sizes. No tensor is split.
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value = "1")]
    pub files: usize,
    /// Maximum size of the tensors in a file, such as 5GB or 512MiB. A tensor that is larger is written to a separate
    /// file.
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
    /// Folder of checkpoints to which the new checkpoint is written. It must be empty, or not exist.
    #[arg(value_name = "DST")]
    pub to: PathBuf,
    /// The number of experts E. It must be a multiple of the granularity G.
    #[arg(long, value_name = "E", value_parser = at_least_one)]
    pub experts: usize,
    /// The granularity G: the number of slices into which each MLP is split. It must divide the width of the MLP. With
    /// 1, each expert is a full copy of the MLP.
    #[arg(long, value_name = "G", default_value = "1", value_parser = at_least_one)]
    pub granularity: usize,
    /// The number of experts per token. The outputs of the model stay the same if it is a multiple of the granularity.
    #[arg(short = 'k', long, value_name = "K", value_parser = at_least_one)]
    pub experts_per_token: usize,
    /// The function that converts router scores to expert weights. With all functions except pre-softmax, the outputs
    /// of the model stay the same.
    #[arg(long, value_enum, default_value_t = Score::Softmax)]
    pub score: Score,
    /// The interval between blocks with experts. With 1, every block has experts.
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    pub every: usize,
    /// The number of blocks at the start of the model that stay dense.
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
    /// Softmax over the selected experts.
    Softmax,
    /// Softmax over all experts.
    PreSoftmax,
    /// Sigmoid of each score, divided by the sum over the selected experts.
    Sigmoid,
    /// Square root of the softplus of each score, divided by the sum over the selected experts.
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
