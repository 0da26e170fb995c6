//! `burn-megatron conformance`.

use std::process::ExitCode;

use burn_megatron::comm::conformance::{self, ConformanceError, Options, Report};
use burn_megatron::comm::{Rank, World};

use crate::cli::ConformanceArgs;
use crate::recipe::Error;

/// Runs the suite on every rank and prints what was checked.
pub fn run(args: &ConformanceArgs) -> Result<ExitCode, Error> {
    let options = Options {
        programs: args.programs,
        seed: args.seed,
        // The threads reduce in the order of the tree.
        fixed_order: true,
        ..Options::default()
    };
    let reports = World::threads(args.ranks)?.run(|rank| check(&rank, &options))?;
    if let Some(report) = reports.first() {
        print_report(report, args.ranks);
    }
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

fn print_report(report: &Report, ranks: usize) {
    println!("{:<28} {:>10} {:>10}", "case", "checks", "seconds");
    for case in &report.cases {
        let seconds = case.time.as_secs_f64();
        println!("{:<28} {:>10} {seconds:>10.2}", case.name, case.checks);
    }
    let seconds: f64 = report
        .cases
        .iter()
        .map(|case| case.time.as_secs_f64())
        .sum();
    println!(
        "all {} cases pass on {ranks} ranks: {} checks in {seconds:.1} s",
        report.cases.len(),
        report.checks(),
    );
}
