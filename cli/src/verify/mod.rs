//! `burn-megatron verify`.

use std::process::ExitCode;

use burn_megatron::verify::verify;

use crate::error::Error;

use args::VerifyArgs;

pub mod args;
mod cases;
mod models;

/// Prints a table per case; the exit code is 0 if all pass.
pub fn run(args: &VerifyArgs) -> Result<ExitCode, Error> {
    let mut passes = true;
    for case in cases::cases(args)? {
        let name = format!("{}, in {}", case.name, case.computing.name());
        eprintln!("{name}");
        let report = verify(&case.subject(), &case.layouts, &case.options(args))?;
        println!("{name}\n{report}\n");
        passes &= report.passes();
    }
    println!(
        "{}",
        if passes {
            "all layouts pass"
        } else {
            "some layouts FAIL"
        }
    );
    Ok(if passes {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
