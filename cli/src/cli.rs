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

/// Large-model training for Burn, with tensor, sequence, pipeline and data parallelism that is checked against one
/// rank.
#[derive(Parser)]
#[command(name = "burn-megatron", version, max_term_width = MAX_COLUMNS)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
    /// The log flags.
    #[command(flatten)]
    pub log: LogArgs,
}

/// Global flags of the log.
#[derive(clap::Args)]
pub struct LogArgs {
    /// Log level of standard error: error, warn, info, debug or trace. The level info also logs the time of each step.
    /// The level debug also logs the phases of each step. The level trace also logs each collective and the update of
    /// each parameter. The progress of a run is shown at every level.
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
    /// Returns the command line with the flags of the given model families.
    pub fn with_families(families: &Families) -> clap::Command {
        let settings = Settings::of(families);
        Self::command().mut_subcommand("pretrain", |pretrain| {
            settings.add_flags(pretrain, "model.")
        })
    }
}

/// The subcommands of `burn-megatron`.
#[derive(Subcommand)]
pub enum Command {
    /// Train a language model on text or token files. The ranks are threads of this process, or separate processes.
    ///
    /// Without flags, `burn-megatron` trains a small Llama on the text of its repository, on the CPU with 2
    /// tensor-parallel x 2 pipeline-parallel x 2 data-parallel ranks. The files metrics.jsonl, timings.jsonl,
    /// config.toml, loss.svg and sample.txt are written to the run folder, and also experts.svg for a model with
    /// experts. A checkpoint is saved at the end of the run, and when the run is interrupted.
    ///
    /// Every setting of a recipe has a flag, such as `--train.clip 0.5`. The value `none` removes an optional setting.
    /// `-h` lists only the flags with a short name, and `--help KEY` describes one setting.
    Pretrain(Box<PretrainArgs>),
    /// Describe a setting of a recipe: its meaning, values, default and flag.
    ///
    /// The same description is printed by `config train.clip`, `config clip` and `pretrain --help clip`. If KEY is a
    /// part of a key, the command lists all keys that contain this part.
    Config(ConfigArgs),
    /// Tokenize text and write token files: PREFIX.bin and PREFIX.idx in the format of Megatron, and PREFIX.json with
    /// metadata.
    ///
    /// The input is text or JSON lines, optionally compressed as .gz or .zst. The token files do not depend on the
    /// number of workers. They get their final names only when all of them are complete, so an interrupted run leaves
    /// no output.
    Preprocess(Box<PreprocessArgs>),
    /// Generate text from a prompt with a saved model, in any parallel layout.
    ///
    /// The text is streamed to standard output, and the speed is written to standard error. With the same seed, the
    /// text is the same in every layout.
    Generate(Box<GenerateArgs>),
    /// Start several ranks as processes on this machine, which communicate over MPI or NCCL.
    ///
    /// Every rank runs the given command, as in `launch --ranks 4 pretrain --steps 20`. Each line of output starts with
    /// the number of the rank. When a rank fails, all other ranks are stopped, and the exit code of the failed rank is
    /// returned. With --max-restarts, the job is restarted from its latest checkpoint after a transient failure. Ctrl-C
    /// stops all ranks, and a second Ctrl-C kills them.
    Launch(Box<LaunchArgs>),
    /// Run one rank under mpirun. Only `launch` starts this command.
    #[command(hide = true)]
    #[cfg(unix)]
    LaunchSlot,
    /// Convert a Hugging Face model to a checkpoint, or a checkpoint to a Hugging Face model.
    ///
    /// The direction depends on the contents of SRC. The model is converted tensor by tensor, and no file is
    /// overwritten unless --overwrite is given.
    Convert(ConvertArgs),
    /// Compare the losses of several runs: print a table, and plot the loss curve of each run.
    Compare(CompareArgs),
    /// Check that parallel layouts compute the same results as one rank, on the CPU, in f64 by default.
    Verify(VerifyArgs),
    /// Find the fastest parallel layouts of a model on a number of devices, with estimates of memory, step time and
    /// communication.
    ///
    /// `plan --model HF_FOLDER --devices 64xH100 --global-batch-size 256` searches all layouts, schedules, ZeRO stages,
    /// micro-batch sizes and kinds of recomputation. The book explains how the times are estimated.
    Plan(Box<PlanArgs>),
    /// Show a pipeline schedule as a table, with its bubble and its memory. With --svg, also draw a Gantt chart.
    Schedule(ScheduleArgs),
    /// Check that the collectives of a communication engine are correct.
    ///
    /// Runs collectives with every operation, dtype, process group and order of calls, and random sequences of
    /// collectives. The result of every rank is compared with a serial model. If a result differs, the error names the
    /// case, the rank, the call and the element.
    Conformance(ConformanceArgs),
    /// Show the environment of a run: the launcher, the communication engines, the devices, and how to install missing
    /// libraries.
    ///
    /// If a program does not start, run `burn-megatron env` with the same launcher instead of the program. The exit
    /// code is 1 if the environment variables of the launcher contradict each other.
    Env(EnvArgs),
    /// Check that a GPU of this machine computes correct results, and print the libraries that are used.
    ///
    /// Compares kernels, matrix multiplications, attention and training steps with the CPU, runs NCCL, and reports
    /// memory and speed. Each check runs in a separate process with a time limit. If a check fails, the command prints
    /// the reason and a remedy, and its exit code is 1.
    CheckGpu(CheckGpuArgs),
    /// Inspect, compare, reshard, verify and upcycle checkpoints.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
}

/// Flags of `config`.
#[derive(Args)]
pub struct ConfigArgs {
    /// A key of a recipe, or a part of a key.
    pub key: String,
}

/// Log level of standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Errors only.
    Error,
    /// Warnings.
    Warn,
    /// Each training step, with its duration.
    Info,
    /// Each phase of a step, with its duration.
    Debug,
    /// Each collective and the update of each parameter, with its duration.
    Trace,
}

impl LogLevel {
    /// Returns the tracing filter: this level for the spans of burn-megatron, and at most `warn` for other libraries.
    pub fn filter(self) -> String {
        let level = format!("{self:?}").to_lowercase();
        let others = if self == Self::Error { "error" } else { "warn" };
        format!("{others},burn_megatron={level},burn_megatron_models={level}")
    }

    /// Returns the span events to log. From `info` on, each span is written when it ends, with its duration.
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
