//! Implements `burn-megatron conformance`.

use std::process::ExitCode;

use burn_megatron::comm::{Engine, Launch, Rank, World};
use burn_megatron::device::DeviceKind;
use burn_megatron_comm_testing::conformance::{
    self, ConformanceError, ConformanceOptions, ConformanceReport, MismatchCase, run_mismatch_case,
};
use clap::Args;

use crate::error::Error;
use crate::ranks::{self, RankArgs, RankSetup};
use crate::settings::NcclFlags;

/// Flags of `conformance`.
#[derive(Args)]
pub struct ConformanceArgs {
    /// Number of ranks. The default is 4 threads of this process, or the number of ranks that a launcher started.
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Make the ranks call collectives that do not match, and print the error on each rank. The value names the
    /// difference between the calls: operation, type, length, root, reduction or message-length.
    #[arg(long, value_name = "KIND")]
    pub mismatch: Option<MismatchCase>,
    /// Number of random programs to run. A program is a sequence of collectives and messages in several process groups.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub programs: usize,
    /// Seed of the random numbers and programs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Flags for the ranks and their timeouts.
    #[command(flatten)]
    pub world: RankArgs,
    /// The NCCL settings.
    #[command(flatten)]
    pub nccl: NcclFlags,
}

/// Runs the conformance suite on every rank, and prints a summary.
pub fn run(args: &ConformanceArgs) -> Result<ExitCode, Error> {
    let started = Launch::from_env()?.map(|launch| launch.world_size);
    let size = args.ranks.or(started).unwrap_or(4);
    let device = match args.world.engine {
        Some(Engine::Nccl) => DeviceKind::Cuda,
        _ => DeviceKind::Cpu,
    };
    let RankSetup { world, engine, .. } = ranks::set_up(&args.world, &args.nccl.0, device, size)?;
    if let Some(mismatch) = args.mismatch {
        return run_mismatch(&world, mismatch);
    }
    let options = ConformanceOptions {
        programs: args.programs,
        seed: args.seed,
        // NCCL reduces in its own order, and its max and min ignore NaN.
        fixed_order: engine != Engine::Nccl,
        nan_wins: engine != Engine::Nccl,
        ..ConformanceOptions::default()
    };
    let reports = world.run(|rank| {
        let report = check(&rank, &options)?;
        Ok::<_, ConformanceError>((rank.rank(), rank.engine(), report))
    })?;
    if let Some((0, engine, report)) = reports.first() {
        print_report(report, size, engine);
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes the ranks call different collectives. Each rank prints its error.
fn run_mismatch(world: &World, mismatch: MismatchCase) -> Result<ExitCode, Error> {
    world.run(|rank| {
        let received = run_mismatch_case(&rank.communicator(), mismatch)?;
        let received = received.map_or("nothing".into(), |error| error.to_string());
        println!("rank {} got: {received}", rank.rank());
        Ok::<_, ConformanceError>(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the suite on one rank. Rank 0 prints the progress.
fn check(rank: &Rank, options: &ConformanceOptions) -> Result<ConformanceReport, ConformanceError> {
    let first = rank.rank() == 0;
    conformance::run(&rank.communicator(), options, &mut |case| {
        if first {
            eprintln!("  {case}");
        }
    })
}

fn print_report(report: &ConformanceReport, ranks: usize, engine: &str) {
    println!("{:<28} {:>10} {:>10}", "case", "checks", "seconds");
    for case in &report.cases {
        let seconds = case.time.as_secs_f64();
        println!("{:<28} {:>10} {seconds:>10.2}", case.name, case.checks);
    }
    let times = report.cases.iter().map(|case| case.time.as_secs_f64());
    let seconds: f64 = times.sum();
    println!(
        "all {} cases pass on {ranks} ranks of {engine}: {} checks in {seconds:.1} s",
        report.cases.len(),
        report.checks(),
    );
}
