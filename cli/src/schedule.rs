//! Implements `burn-megatron schedule`.

use std::path::PathBuf;
use std::process::ExitCode;

use burn_megatron::atomic_file::replace_file;
use burn_megatron::mesh::{ParallelConfig, ScheduleSource};
use burn_megatron::pipeline::schedule::{ScheduleKind, StageTimes, simulate, validate};
use burn_megatron::pipeline::schedule_of;
use clap::Args;

use crate::error::Error;
use crate::numbers::at_least_one;
use crate::terminal;

/// Flags of `schedule`.
#[derive(Args)]
pub struct ScheduleArgs {
    /// Schedule: gpipe, 1f1b, eager-1f1b, interleaved, interleaved:N, zb-h1, zb-v, dualpipe-v, or a CSV file.
    #[arg(long, value_name = "NAME|FILE.csv", default_value = "1f1b")]
    pub pipeline_schedule: String,
    /// Number of pipeline stages over all ranks.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = at_least_one)]
    pub stages: usize,
    /// Number of pipeline stages per rank. The default depends on the schedule.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub virtual_stages: Option<usize>,
    /// Number of micro-batches per step.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub micro_batches: usize,
    /// Run each forward together with the backward of another micro-batch, as parallel.overlap_moe_expert_parallel_comm
    /// does.
    #[arg(long)]
    pub pairs: bool,
    /// Four times, in any unit: the forward, the input gradients of the backward, the weight gradients of the backward,
    /// and the transfer between stages.
    #[arg(
        long,
        value_name = "F,I,W,T",
        value_delimiter = ',',
        num_args = 1,
        default_value = "1,1,1,0"
    )]
    pub times: Vec<f64>,
    /// Write a Gantt chart to this file.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Write the schedule, with sends, receives and gradient reductions, to this CSV file. --pipeline-schedule can read
    /// this file.
    #[arg(long, value_name = "FILE.csv")]
    pub csv: Option<PathBuf>,
    /// Width of the table in characters. The default is the width of the terminal.
    #[arg(long, value_name = "N")]
    pub columns: Option<usize>,
}

/// Prints the table, the bubble and the memory, and writes the chart and the CSV file.
pub fn run(args: &ScheduleArgs) -> Result<ExitCode, Error> {
    let virtual_stages = match args.pipeline_schedule.parse::<ScheduleKind>() {
        Ok(kind) => args.virtual_stages.unwrap_or(kind.default_virtual_stages()),
        Err(_) => args.virtual_stages.unwrap_or(1),
    };
    if !args.stages.is_multiple_of(virtual_stages) {
        return Err(format!(
            "invalid --stages {}: expected a multiple of {virtual_stages}, the stages of each rank",
            args.stages,
        )
        .into());
    }
    let ranks = args.stages / virtual_stages;
    let layout = ParallelConfig {
        virtual_stages: args.virtual_stages,
        ..ParallelConfig::new()
            .with_pipeline(ranks)
            .with_schedule(args.pipeline_schedule.parse::<ScheduleSource>()?)
            .with_overlap_moe_expert_parallel_comm(args.pairs)
    };
    let schedule = schedule_of(&layout, args.micro_batches)?;
    let &[forward, input, weight, transfer] = &args.times[..] else {
        let count = args.times.len();
        return Err(
            format!("invalid --times: expected four numbers, as in 1,1,1,0, got {count}").into(),
        );
    };
    validate(&schedule)?;
    let times = StageTimes::uniform(schedule.stages(), forward, input, weight, transfer);
    let simulation = simulate(&schedule, &times)?;
    let columns = args.columns.unwrap_or_else(terminal::columns);
    println!("{}", terminal::wrapped(&simulation.table(columns)));
    if let Some(path) = &args.svg {
        burn_megatron_plot::write(path, &burn_megatron_plot::schedule_chart(&simulation)?)?;
        println!("chart written to {}", path.display());
    }
    if let Some(path) = &args.csv {
        replace_file(path, schedule.to_csv().as_bytes())
            .map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
        println!("schedule written to {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}
