//! The command line: its commands and the global flags.

use crate::check_gpu::CheckGpuArgs;
use crate::checkpoint::args::CheckpointCommand;
use crate::compare::CompareArgs;
use crate::conformance::ConformanceArgs;
use crate::convert::ConvertArgs;
use crate::env::EnvArgs;
use crate::family::Families;
use crate::generate::args::GenerateArgs;
use crate::launch::args::LaunchArgs;
use crate::plan::args::PlanArgs;
use crate::preprocess::args::PreprocessArgs;
use crate::pretrain::args::PretrainArgs;
use crate::schedule::ScheduleArgs;
use crate::settings::Settings;
use crate::terminal::MAX_COLUMNS;
use crate::verify::args::VerifyArgs;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use tracing_subscriber::fmt::format::FmtSpan;

/// Large-model training for Burn: tensor, sequence, pipeline and data parallelism, checked against one
/// rank.
#[derive(Parser)]
#[command(name = "burn-megatron", version, max_term_width = MAX_COLUMNS)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// The log of a command.
#[derive(clap::Args)]
pub struct LogArgs {
    /// Messages on standard error: error, warn, info (also the time of each step), debug (also its phases) or trace
    /// (also each collective and each parameter's update). The progress of a run is shown at every level.
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "LEVEL",
        default_value_t = LogLevel::Warn,
        hide_possible_values = true,
        help_heading = "Logging",
        display_order = 1000
    )]
    pub log_level: LogLevel,
}

impl Cli {
    /// Returns the command line with the flags of these model families.
    pub fn with_families(families: &Families) -> clap::Command {
        let settings = Settings::of(families);
        Self::command().mut_subcommand("pretrain", |pretrain| {
            settings.add_flags(pretrain, "model.")
        })
    }
}

/// The commands.
#[derive(Subcommand)]
pub enum Command {
    /// Train a language model on text or token files. Ranks are threads of this process, or processes.
    ///
    /// Without flags `burn-megatron` trains a small Llama on the text of its repository, tensor 2 x pipeline 2 x
    /// data 2 on the CPU. Writes metrics.jsonl, timings.jsonl, config.toml, loss.svg, sample.txt and, for a model with
    /// experts, experts.svg to a run folder, and a checkpoint at the end and when the run is interrupted.
    ///
    /// Every setting of a recipe has a flag, such as `--train.clip 0.5`. `none` removes an optional setting. `-h` lists the flags
    /// with a short name only, `--help KEY` describes one setting.
    Pretrain(Box<PretrainArgs>),
    /// Describe a setting of a recipe: its meaning, values, default and flag.
    ///
    /// `config train.clip`, `config clip` or `pretrain --help clip`; a part of a key lists all keys that have it.
    Config(ConfigArgs),
    /// Tokenize text into token files: PREFIX.bin and PREFIX.idx in Megatron's format, and PREFIX.json, which
    /// describes them.
    ///
    /// Reads text and JSON lines, also compressed as .gz or .zst. The files are the same for any number of
    /// workers. They get their names only when all are complete: an interrupted run leaves none.
    Preprocess(Box<PreprocessArgs>),
    /// Generate text from a prompt with a saved model, in any layout.
    ///
    /// Streams the text to standard output, and writes the speed to standard error. The same seed gives
    /// the same text in every layout.
    Generate(Box<GenerateArgs>),
    /// Start ranks as processes of this machine, for MPI or NCCL.
    ///
    /// Every rank runs the command that follows, as in `launch --ranks 4 pretrain --steps 20`. Each line of output
    /// is prefixed with its rank. When a rank fails, all others are ended, and its exit code is returned; with --max-restarts
    /// the job is started again from its newest checkpoint, if the fault may pass.
    /// Ctrl-C stops all ranks; a second one kills them.
    Launch(Box<LaunchArgs>),
    /// Take the place of one rank under mpirun; `launch` starts it.
    #[command(hide = true)]
    #[cfg(unix)]
    LaunchSlot,
    /// Convert a Hugging Face model to a checkpoint, or back.
    ///
    /// The folder SRC decides which. The model is converted tensor by tensor, and no file is overwritten.
    Convert(ConvertArgs),
    /// Compare the losses of runs: a table, and a plot with a curve for each.
    Compare(CompareArgs),
    /// Check that layouts compute the same as one rank, on the CPU, in f64 unless another type is given.
    Verify(VerifyArgs),
    /// Find the fastest layouts of a model on some devices: their memory, time and traffic, before anything is built.
    ///
    /// `plan --model HF_FOLDER --devices 64xH100 --global-batch-size 256` searches every layout and schedule, ZeRO stage,
    /// micro-batch and recomputation. The times are estimates: see the book.
    Plan(Box<PlanArgs>),
    /// Show a pipeline schedule: a table, its bubble and memory, and with --svg a Gantt chart.
    Schedule(ScheduleArgs),
    /// Check that the collectives of an engine are correct.
    ///
    /// Runs every operation, type, group and order of calls, and random programs, and compares the result
    /// of every rank with a serial model. The first difference is an error that names the case, the rank,
    /// the call and the element.
    Conformance(ConformanceArgs),
    /// Show the environment of a run: launcher, engines, devices, and how to install what is missing.
    ///
    /// Run it in place of a program that does not start, with the same launcher. Exits with 1 if the
    /// variables of the launcher contradict each other.
    Env(EnvArgs),
    /// Check that a GPU of this machine computes right results, and with which libraries.
    ///
    /// Compares kernels, matrix products, attention and training steps with the CPU, runs NCCL, and reports memory and speed.
    /// Each check is a process with a time limit. Exits with 1 if one fails, with the reason and the remedy.
    CheckGpu(CheckGpuArgs),
    /// Inspect, compare, reshard, verify and upcycle checkpoints.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
}

/// Flags of `config`.
#[derive(Args)]
pub struct ConfigArgs {
    /// A key of a recipe, or a part of one.
    pub key: String,
}

/// Log level of standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Errors only.
    Error,
    /// Warnings.
    Warn,
    /// Steps, with their times.
    Info,
    /// Each phase of a step, with its time.
    Debug,
    /// Each collective and each parameter's update, with its time.
    Trace,
}

impl LogLevel {
    /// The filter: our own spans at this level, those of other libraries at most at `warn`.
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

    #[test]
    fn the_flags_are_consistent() {
        Cli::with_families(&Families::transformers()).debug_assert();
    }
}
