//! The flags, as `--help` explains them.

use std::path::PathBuf;

use crate::bench::args::{BenchArgs, OverlapArgs};
use crate::bench::checkpoint::CheckpointBenchArgs;
use crate::bench::preprocess::PreprocessBenchArgs;
use crate::checkpoint::args::CheckpointCommand;
use crate::convert::ConvertArgs;
use crate::data::DataArgs;
use crate::fp8::{Fp8Args, Fp8Choice};
use crate::generate::args::GenerateArgs;
use crate::launch::args::{KeepArgs, LaunchArgs};
use crate::preprocess::args::PreprocessArgs;
use crate::saving::SavingArgs;
use crate::sharing::SharingArgs;
use burn_megatron::comm::Engine;
use burn_megatron::comm::testing::conformance::Mismatch;
use burn_megatron::comm::testing::inject::Fault;
use burn_megatron::device::DeviceKind;
use burn_megatron::verify::Layout;
use clap::{Args, Parser, Subcommand, ValueEnum};
use tracing_subscriber::fmt::format::FmtSpan;

/// Large-model training for Burn: tensor, sequence, pipeline and data parallelism, checked against one
/// rank.
#[derive(Parser)]
#[command(name = "burn-megatron", version, max_term_width = 100)]
pub struct Cli {
    /// What to run.
    #[command(subcommand)]
    pub command: Command,
    /// What to write to standard error besides the progress: `debug` shows the phases of each step
    /// with their times, `trace` each collective and each parameter's update.
    #[arg(long, global = true, value_enum, default_value_t = LogLevel::Warn)]
    pub log_level: LogLevel,
}

/// The commands.
#[derive(Subcommand)]
pub enum Command {
    /// Train a language model on text or token files, over ranks that are threads of this process, or processes.
    ///
    /// Without flags: a small Llama on the text of this repository, tensor 2 x pipeline 2 x data 2 on the
    /// CPU.
    /// Numbers go to a run folder: metrics.jsonl, timings.jsonl, config.toml, loss.svg, sample.txt.
    /// The weights too, in checkpoints, at the end and where the run is interrupted.
    Pretrain(Box<PretrainArgs>),
    /// Make token files of text: PREFIX.bin and PREFIX.idx, as Megatron's own, and PREFIX.json, which says
    /// what is in them.
    ///
    /// Reads text and JSON lines, also packed as .gz or .zst. The files are the same for any number of
    /// workers, and have their names once all is written: interrupted work leaves nothing there.
    Preprocess(Box<PreprocessArgs>),
    /// Write text after a prompt, with a model from the disk, over any ranks.
    ///
    /// The text goes to standard output as it comes, how fast it came to standard error. The same seed
    /// gives the same text in every layout.
    Generate(Box<GenerateArgs>),
    /// Start ranks as processes: of this machine or of several, through mpirun or without it.
    ///
    /// What follows -- is the command that every rank runs, as in `launch --ranks 4 -- pretrain`. Each
    /// line that a rank writes gets its number in front. When one rank fails all others are ended, and
    /// the exit code is that of the one. Ctrl-C stops all ranks; a second one kills them.
    Launch(Box<LaunchArgs>),
    /// Keep one rank of `launch`, which calls this itself.
    #[command(hide = true)]
    LaunchKeeper(KeepArgs),
    /// Convert a model of Hugging Face to a checkpoint, or back.
    ///
    /// `convert --from hf DIR --to DIR` or `convert --from checkpoint PATH --to DIR`. Families: GPT-2,
    /// Llama, Mistral, Qwen 2 and 3. The model is never whole in memory, and nothing is written over.
    Convert(ConvertArgs),
    /// Compare the losses of runs: a table, and a picture with a curve for each.
    Compare(CompareArgs),
    /// Check that layouts compute what one rank computes, on the CPU, in f64 unless another type is given.
    Verify(VerifyArgs),
    /// Show a pipeline schedule: a table in the terminal, its bubble and its memory, a Gantt chart.
    Schedule(ScheduleArgs),
    /// Check that the collectives of an engine do what they promise.
    ///
    /// Every operation, type, group and order of calls, and random programs, each compared with a serial
    /// model of what every rank must get. The first difference ends it with an error that names the case,
    /// the rank, the call and the element.
    Conformance(ConformanceArgs),
    /// Show what a run would find here: launcher, engines, devices, and how to install what is
    /// missing.
    ///
    /// Start it in place of a program that does not start, with the same launcher. It ends with 1 where
    /// the variables of the launcher contradict each other.
    Env(EnvArgs),
    /// Look at checkpoints, compare them, check them, write them into other files.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Time parts of the library on a device.
    #[command(subcommand)]
    Bench(BenchCommand),
}

/// What can be timed.
#[derive(Subcommand)]
pub enum BenchCommand {
    /// Each kernel beside the same of Burn's operations and beside a copy of as many bytes.
    Kernels(BenchArgs),
    /// How much of the data-parallel communication is hidden behind the computation: trains a GPT on
    /// ranks that are joined by a slow link, for each ZeRO stage with and without overlap.
    Overlap(OverlapArgs),
    /// Megabytes of text that `preprocess` makes tokens of in a second, beside the tokenizers library
    /// alone, with as many threads and the text in memory.
    Preprocess(PreprocessBenchArgs),
    /// How fast checkpoints are saved and loaded beside a copy and a read of the same bytes, and how much
    /// training is held up by those that are written while it goes on.
    Checkpoint(CheckpointBenchArgs),
}

/// Flags of `env`.
#[derive(Args)]
pub struct EnvArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `compare`.
#[derive(Args)]
pub struct CompareArgs {
    /// Run folders; the others are compared with the first.
    #[arg(required = true, value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// Where the picture goes.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// What stands above the picture.
    #[arg(long, value_name = "TEXT", default_value = "Loss")]
    pub title: String,
}

/// Flags of `schedule`.
#[derive(Args)]
pub struct ScheduleArgs {
    /// gpipe, 1f1b, interleaved, interleaved:N, zb-h1, zb-v, dualpipe-v, or a CSV file.
    #[arg(long, value_name = "NAME|FILE.csv", default_value = "1f1b")]
    pub kind: String,
    /// Stages of the pipeline, over all its ranks.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub stages: usize,
    /// Stages on each rank; as many as the kind usually has by default.
    #[arg(long, value_name = "V")]
    pub virtual_stages: Option<usize>,
    /// Micro-batches of a step.
    #[arg(long, value_name = "M", default_value_t = 8)]
    pub micro_batches: usize,
    /// Times of a forward, an input gradient, a weight gradient and a transfer, in any unit.
    #[arg(long, value_name = "F,I,W,T", value_delimiter = ',', num_args = 1,
          default_values_t = [1.0, 1.0, 1.0, 0.0])]
    pub times: Vec<f64>,
    /// Where the Gantt chart goes.
    #[arg(long, value_name = "FILE.svg", default_value = "schedule.svg")]
    pub svg: PathBuf,
    /// Where the schedule goes as a table that --kind and --schedule read.
    #[arg(long, value_name = "FILE.csv")]
    pub csv: Option<PathBuf>,
    /// Width of the table in characters.
    #[arg(long, value_name = "N", default_value_t = 120)]
    pub columns: usize,
}

/// Flags about the ranks themselves.
#[derive(Args)]
pub struct RankArgs {
    /// What joins the ranks: threads of this process, nccl or mpi. By default threads; where a launcher
    /// started this process as one rank of several, mpi, and with --device cuda nccl.
    #[arg(long, value_name = "threads|nccl|mpi")]
    pub engine: Option<Engine>,
    /// Seconds after which a collective that is not complete is an error that names the missing
    /// ranks.
    #[arg(long, value_name = "SECONDS", default_value_t = 100.0)]
    pub deadline: f64,
    /// The same for the first collective of a group and for the first step; between processes also
    /// for all ranks to come.
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    pub first_deadline: f64,
    /// Seconds without a sign of life after which the process of a rank counts as lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub silence: f64,
    /// File of mode 0600 with the token that lets ranks in: 64 hexadecimal digits, the same for all. By
    /// default BURN_MEGATRON_TOKEN; under `launch` and mpirun none is needed.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Let NCCL move large tensors through memory that is registered with it; the header says what came
    /// of it.
    #[arg(long)]
    pub nccl_registered: bool,
}

/// Flags of `conformance`.
#[derive(Args)]
pub struct ConformanceArgs {
    /// Ranks; 4 threads of this process by default, and as many as a launcher started.
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Where the ranks are, and how long they wait for each other.
    #[command(flatten)]
    pub world: RankArgs,
    /// Let the ranks disagree on purpose, and show what each is told: operation, type, length, root,
    /// reduction or message-length.
    #[arg(long, value_name = "KIND")]
    pub mismatch: Option<Mismatch>,
    /// Random programs of collectives and messages over several groups.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub programs: usize,
    /// Seed of all numbers and programs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// Flags of `pretrain`; each one takes the place of a setting of the recipe.
#[derive(Args)]
pub struct PretrainArgs {
    /// The recipe, a TOML file; the default is that of the run that goes on, and else
    /// examples/recipes/tiny.toml.
    #[arg(long, value_name = "FILE.toml")]
    pub recipe: Option<PathBuf>,
    /// What it is trained on.
    #[command(flatten)]
    pub data: DataArgs,
    /// Ranks that share each layer.
    #[arg(long, visible_alias = "tp", value_name = "N")]
    pub tensor_parallel: Option<usize>,
    /// Ranks that share the batch.
    #[arg(long, visible_alias = "dp", value_name = "N")]
    pub data_parallel: Option<usize>,
    /// Split the activations between the blocks along the sequence, over the ranks of
    /// --tensor-parallel.
    #[arg(long, visible_alias = "sp", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub sequence_parallel: Option<bool>,
    /// Ranks that share the layers, each with its stages.
    #[arg(long, visible_alias = "pp", value_name = "N")]
    pub pipeline_parallel: Option<usize>,
    /// Stages on each rank of the pipeline.
    #[arg(long, value_name = "V")]
    pub virtual_stages: Option<usize>,
    /// In which order the ranks of the pipeline work: gpipe, 1f1b, interleaved, interleaved:N (in
    /// groups of N micro-batches), zb-h1, zb-v, dualpipe-v, or a CSV file.
    #[arg(long, value_name = "NAME|FILE.csv")]
    pub schedule: Option<String>,
    /// Let the last stage put off the weight gradients of the output layer to its cool-down, at
    /// most LIMIT at once (0, or no number: all).
    #[arg(long, value_name = "LIMIT", num_args = 0..=1, default_missing_value = "0")]
    pub defer_embedding_wgrad: Option<usize>,
    /// Micro-batches of a step on each rank of --data-parallel; says how large they are.
    #[arg(long, value_name = "M", conflicts_with = "micro_batch_size")]
    pub micro_batches: Option<usize>,
    /// Samples that a rank runs through the model at once.
    #[arg(long, value_name = "N")]
    pub micro_batch_size: Option<usize>,
    /// Samples of a step, over all ranks and micro-batches.
    #[arg(long, value_name = "N")]
    pub global_batch_size: Option<usize>,
    /// Optimizer steps.
    #[arg(long, value_name = "N")]
    pub steps: Option<usize>,
    /// Peak of the learning rate; its end keeps its ratio to the peak.
    #[arg(long, value_name = "RATE")]
    pub lr: Option<f64>,
    /// Seed of weights, dropout, samples and generated text.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// What is sharded over --data-parallel, in which type, and what overlaps.
    #[command(flatten)]
    pub sharing: SharingArgs,
    /// Which layers multiply in 8 bits, and how.
    #[command(flatten)]
    pub fp8: Fp8Args,
    /// What is saved, and where the run goes on.
    #[command(flatten)]
    pub saving: SavingArgs,
    /// Where the model runs: cpu, wgpu or cuda. The last two must be compiled in
    /// (--features wgpu, --features cuda).
    #[arg(long, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// Which operations run as fused kernels: auto, fused or unfused for all, or for one, as in
    /// `unfused,norm=fused`. The operations: norm, activation, dropout, rope, attention, softmax,
    /// loss, linear, optimizer.
    #[arg(long, value_name = "CHOICE|OPERATION=CHOICE,..")]
    pub kernels: Vec<String>,
    /// Compute threads of each rank on the CPU; the cores are shared out evenly by default.
    #[arg(long, value_name = "N")]
    pub compute_threads: Option<usize>,
    /// Where the ranks are, and how long they wait for each other.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// Seconds that Ctrl-C and SIGTERM give the step in hand to end, and what follows it to be written, or
    /// twice the longest step where that is more; then the process ends with 130.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub grace: f64,
    /// Folder in which the run gets a folder of its own; runs by default.
    #[arg(long, value_name = "PATH", conflicts_with = "run_dir")]
    pub runs: Option<PathBuf>,
    /// The run's own folder, which must not be there yet, unless the run goes on with --resume.
    #[arg(long, value_name = "PATH")]
    pub run_dir: Option<PathBuf>,
    /// Begin even where parameters, gradients, optimizer state and logits alone are more than the memory of
    /// this machine, or of its cgroup.
    #[arg(long)]
    pub ignore_memory: bool,
    /// Print the resolved recipe and stop.
    #[arg(long)]
    pub print_recipe: bool,
    /// Let a call of one rank fail on purpose: KIND@rank=N,call=N, counted from the start and from 0, or
    /// KIND@rank=N,step=N,call=N, counted from the beginning of the step. KIND is delay:TIME (as in
    /// delay:2.5s), drop, shape, wrong-call, nan, panic, error, kill, abort, segfault, stop, terminate,
    /// interrupt or spin; never-starts@rank=N is a rank that does not come. May be given several times.
    #[arg(long, value_name = "FAULT", help_heading = "Testing")]
    pub inject: Vec<Fault>,
}

/// Flags of `verify`.
#[derive(Args)]
pub struct VerifyArgs {
    /// Layouts, such as `tp2-sp-dp2,tp4`: tpN tensor, sp sequence parallel, dpN data,
    /// ppN pipeline, mbN samples per micro-batch, zN ZeRO stage, hsdpN ranks of a sharding group; then,
    /// after a slash, the pipeline's schedule and the stages on each rank, as in
    /// `pp2-mb1/interleaved/v2`. The default is tensor {1,2,4} x sequence parallel {off,on} x data
    /// {1,2}, twelve pipelines, twelve sharded ones, and settings in some; of a recipe its own layout.
    #[arg(long, value_delimiter = ',', value_name = "LAYOUT")]
    pub layouts: Vec<Layout>,
    /// Models to check.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "MODEL",
          default_values_t = [VerifyModel::Gpt, VerifyModel::GptUntied, VerifyModel::Llama, VerifyModel::LlamaTied])]
    pub models: Vec<VerifyModel>,
    /// Check a recipe instead, with its batch and all of its settings that decide what is computed, on random
    /// tokens; --layouts stand for its ranks, zero_stage, hsdp and micro-batches. Keep it small, this runs in
    /// f64.
    #[arg(long, value_name = "FILE.toml", conflicts_with = "models")]
    pub recipe: Option<PathBuf>,
    /// Check every model with three seeds, every setting, the types f32 and bf16, and all recipes of 8 bits:
    /// some minutes.
    #[arg(long, conflicts_with_all = ["recipe", "layouts", "fp8", "precision", "seed"])]
    pub all: bool,
    /// Which operations run as fused kernels; see `pretrain --help`.
    #[arg(long, value_name = "CHOICE|OPERATION=CHOICE,..")]
    pub kernels: Vec<String>,
    /// Let several documents stand in each sample, which see nothing of each other.
    #[arg(long)]
    pub packed: bool,
    /// Samples per step; 8, or the global batch of the recipe.
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// Optimizer steps before the weights are compared.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub steps: u16,
    /// Multiply in 8 bits in the linear layers of the blocks, with this recipe for the scales; one rank
    /// does the same.
    #[arg(long, value_name = "delayed|current|blockwise|mxfp8|none")]
    pub fp8: Option<Fp8Choice>,
    /// The type to compute in; f64 where not given, whatever the precision of the recipe. Narrower ones pass
    /// within a bound that follows from the type, and is printed.
    #[arg(long, value_enum, value_name = "f64|f32|bf16")]
    pub precision: Option<VerifyType>,
    /// The largest relative difference that passes where only the order of sums differs: 1e-10 by default.
    /// Layouts that round other values than one rank have a bound of their own, which is printed.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = tolerance)]
    pub tolerance: Option<f64>,
    /// Seed of weights, dropout and tokens; 1, or that of the recipe.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// The types in which `verify` computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyType {
    /// 64 bits, in which rounding is far below any mistake.
    F64,
    /// 32 bits.
    F32,
    /// 16 bits, with masters in f32.
    Bf16,
}

/// A bound that a difference can be within.
fn tolerance(text: &str) -> Result<f64, String> {
    let tolerance = text.parse().ok();
    let tolerance = tolerance.filter(|tolerance: &f64| tolerance.is_finite() && *tolerance >= 0.0);
    tolerance.ok_or_else(|| "a finite number from 0 on is expected, such as 1e-10".into())
}

/// The small models of `verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyModel {
    /// GPT-2, output tied to the embedding, dropout, padded vocabulary.
    Gpt,
    /// The same with an output weight of its own, label smoothing, z-loss and zero-centred norms.
    GptUntied,
    /// Llama with two groups of keys and values, biases of queries, keys and values, norms of heads, and
    /// positions scaled as in Llama 3.
    Llama,
    /// Llama with one group, output tied, a window, z-loss, zero-centred norms, and positions scaled by YaRN.
    LlamaTied,
}

/// How much to write to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Nothing but errors.
    Error,
    /// What may be wrong.
    Warn,
    /// Each step.
    Info,
    /// Each phase of a step, with its time.
    Debug,
    /// Each collective and each parameter's update, with its time.
    Trace,
}

impl LogLevel {
    /// Our own spans at this level, those of libraries at most at `warn`.
    pub fn filter(self) -> String {
        let level = format!("{self:?}").to_lowercase();
        let others = if self == Self::Error { "error" } else { "warn" };
        format!("{others},burn_megatron={level},burn_megatron_models={level}")
    }

    /// Spans are written when they end, with their times.
    pub fn span_events(self) -> FmtSpan {
        match self {
            Self::Error | Self::Warn => FmtSpan::NONE,
            Self::Info | Self::Debug | Self::Trace => FmtSpan::CLOSE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_flags_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_tolerance_is_a_bound() {
        let verify = |tolerance: &str| {
            let flag = format!("--tolerance={tolerance}");
            match Cli::try_parse_from(["burn-megatron", "verify", &flag]) {
                Ok(cli) => match cli.command {
                    Command::Verify(args) => Ok(args.tolerance),
                    _ => unreachable!("verify was asked for"),
                },
                Err(error) => Err(error.to_string()),
            }
        };
        assert_eq!(verify("1e-9"), Ok(Some(1e-9)));
        assert_eq!(verify("0"), Ok(Some(0.0)));
        for wrong in [
            "nan", "NaN", "inf", "-inf", "infinity", "-1", "-1e-300", "1e999", "x", "",
        ] {
            let error = verify(wrong).unwrap_err();
            assert!(
                error.contains("a finite number from 0 on is expected, such as 1e-10"),
                "{wrong}: {error}"
            );
        }
        let apart = ["burn-megatron", "verify", "--tolerance", "-1"];
        let error = Cli::try_parse_from(apart).map(|_| ()).unwrap_err();
        assert!(
            error.to_string().contains("a finite number from 0 on"),
            "{error}"
        );
    }
}
