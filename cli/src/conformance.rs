//! `burn-megatron conformance`.

use std::process::ExitCode;

use burn_megatron::comm::testing::conformance::{
    self, ConformanceError, Mismatch, Options, Report, mismatch_cases,
};
use burn_megatron::comm::{Engine, Launch, Rank, World};
use burn_megatron::device::DeviceKind;

use crate::cli::ConformanceArgs;
use crate::ranks::{self, Ranks};
use crate::recipe::Error;

/// Runs the suite on every rank and prints what was checked.
pub fn run(args: &ConformanceArgs) -> Result<ExitCode, Error> {
    let started = Launch::from_env()?.map(|launch| launch.world_size);
    let size = args.ranks.or(started).unwrap_or(4);
    let device = match args.world.engine {
        Some(Engine::Nccl) => DeviceKind::Cuda,
        _ => DeviceKind::Cpu,
    };
    let Ranks { world, engine, .. } = ranks::of(&args.world, device, size)?;
    if let Some(mismatch) = args.mismatch {
        return disagree(&world, mismatch);
    }
    let options = Options {
        programs: args.programs,
        seed: args.seed,
        // NCCL has an order of its own, and lets a NaN pass.
        fixed_order: engine != Engine::Nccl,
        nan_wins: engine != Engine::Nccl,
        ..Options::default()
    };
    let reports = world.run(|rank| {
        let report = check(&rank, &options)?;
        Ok::<_, ConformanceError>((rank.rank(), rank.engine().to_owned(), report))
    })?;
    if let Some((0, engine, report)) = reports.first() {
        print_report(report, size, engine);
    }
    Ok(ExitCode::SUCCESS)
}

/// Lets the ranks disagree; each shows what it is told.
fn disagree(world: &World, mismatch: Mismatch) -> Result<ExitCode, Error> {
    world.run(|rank| {
        let told = mismatch_cases(&rank.communicator(), mismatch)?;
        let told = told.map_or("nothing".into(), |error| error.to_string());
        println!("rank {} is told: {told}", rank.rank());
        Ok::<_, ConformanceError>(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The suite on one rank; the first one says how far it is.
fn check(rank: &Rank, options: &Options) -> Result<Report, ConformanceError> {
    let first = rank.rank() == 0;
    conformance::run(&rank.communicator(), options, &mut |case| {
        if first {
            eprintln!("  {case}");
        }
    })
}

fn print_report(report: &Report, ranks: usize, engine: &str) {
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
