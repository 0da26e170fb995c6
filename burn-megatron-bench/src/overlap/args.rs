//! The flags of `overlap`.

use std::path::PathBuf;
use std::time::Duration;

use burn_megatron::data_parallel::ZeroStage;
use burn_megatron_cli::internal::{RankArgs, at_least_one};
use clap::Args;

use super::tensor::TpCommOverlapSetting;
use crate::args::{StepFlags, above_zero};
use crate::layers::LayersRun;
use crate::links::{LinkStep, Rounds};

/// Flags of `overlap`.
#[derive(Args)]
pub struct OverlapArgs {
    /// Number of layers in the model.
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub layers: usize,
    /// Hidden size of the model.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub hidden: usize,
    /// Number of tokens per sample.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub context: usize,
    /// Number of samples per rank and step.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub micro_batch_size: usize,
    /// Number of data-parallel ranks, each with one compute thread. At least 2.
    #[arg(long, visible_alias = "dp", value_name = "N", default_value_t = 2)]
    pub data_parallel: usize,
    /// Number of ranks per node. The link inside a node is eight times as fast as the link between nodes. With stage 0,
    /// gradients are first summed within each node (hierarchical_reduce). With the other stages, each node holds all
    /// shards (hsdp).
    #[arg(long, value_name = "N", conflicts_with = "model_axis", value_parser = at_least_one)]
    pub ranks_per_node: Option<usize>,
    /// Measure the overlap of tensor-parallel communication instead, in MLPs with sequence parallelism, on these
    /// numbers of tensor-parallel ranks.
    #[arg(
        long,
        visible_alias = "tp",
        value_delimiter = ',',
        value_name = "N,..",
        group = "model_axis",
        conflicts_with_all = ["data_parallel", "zero_stages", "bucket_size", "bandwidth_mb_s", "trace", "svg"]
    )]
    pub tensor_parallel: Vec<usize>,
    /// Measure the overlap of expert-parallel communication with the computation of another micro-batch instead, on
    /// these numbers of ranks.
    #[arg(
        long,
        visible_alias = "ep",
        value_delimiter = ',',
        value_name = "N,..",
        group = "model_axis",
        conflicts_with_all = ["data_parallel", "zero_stages", "bucket_size", "bandwidth_mb_s", "trace", "svg", "engine"]
    )]
    pub expert_parallel: Vec<usize>,
    /// Number of micro-batches per step with --expert-parallel. Each has --micro-batch-size samples.
    #[arg(long, value_name = "M", default_value_t = 8, requires = "expert_parallel", value_parser = at_least_one)]
    pub micro_batches: usize,
    /// Methods of splitting the communication of --tensor-parallel into chunks: none, ring, bulk, ring:N or bulk:N. N
    /// is the number of chunks. Without N, it depends on the sizes.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAME,..",
        default_value = "none,ring,bulk:8",
        requires = "tensor_parallel"
    )]
    pub tp_comm_overlap: Vec<TpCommOverlapSetting>,
    /// With --tensor-parallel or --expert-parallel, use a virtual clock. It advances only by matrix
    /// multiplications and transfers. The virtual clock is always used if there are more threads than cores.
    #[arg(long, requires = "model_axis")]
    pub counted: bool,
    /// Flags for the number of steps and the JSON file.
    #[command(flatten)]
    pub steps: StepFlags,
    /// ZeRO stages: 0 shards nothing, 1 shards the optimizer state, 2 also gradients, 3 also parameters.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "STAGE,..",
        default_value = "0,1,2,3"
    )]
    pub zero_stages: Vec<ZeroStage>,
    /// Number of elements per gradient bucket. Default: a twelfth of the model, or one block for stage 3.
    #[arg(long, value_name = "ELEMENTS")]
    pub bucket_size: Option<usize>,
    /// Latency of each collective on the simulated link, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 100)]
    pub latency_us: u64,
    /// Time of the transfers of a step with ZeRO stage 0, as a fraction of the time of its backward. The bandwidth of
    /// the simulated link is computed from this fraction: steps without a simulated link are measured before each
    /// stage. Stage 3 sends 1.5 times the number of bytes. With --tensor-parallel and --expert-parallel, it is a
    /// fraction of the time of a whole step without a simulated link.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.6, value_parser = above_zero)]
    pub share: f64,
    /// Bandwidth of each rank's link in MB/s (1e6 bytes), instead of --share.
    #[arg(long, value_name = "MB/S", conflicts_with = "share", value_parser = above_zero)]
    pub bandwidth_mb_s: Option<f64>,
    /// Write a trace of each case to this folder, which Perfetto and Chrome can open: overlap-STAGE.json with overlap,
    /// and overlap-STAGE-off.json without overlap.
    #[arg(long, value_name = "DIR")]
    pub trace: Option<PathBuf>,
    /// Write a plot of one step of each case to this file.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Flags for the ranks of --tensor-parallel: threads of this process, or processes that a launcher started.
    #[command(flatten)]
    pub world: RankArgs,
}

impl OverlapArgs {
    /// Returns the latency of a collective on the simulated link.
    pub fn latency(&self) -> Duration {
        Duration::from_micros(self.latency_us)
    }

    /// Returns the benchmark of layers in which ranks communicate activations.
    pub fn layers(&self, ranks: usize, counted: bool, blocked: fn(&LinkStep) -> f64) -> LayersRun {
        LayersRun {
            ranks,
            rounds: Rounds {
                counted,
                ..Rounds::from(&self.steps)
            },
            share: self.share,
            latency: self.latency(),
            blocked,
        }
    }
}
