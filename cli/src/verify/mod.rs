//! `burn-megatron verify`.

use std::process::ExitCode;

use crate::command_line::CommandLine;
use crate::error::Error;

use args::VerifyArgs;
pub use cases::VerifyCase;

pub mod args;
mod cases;
mod models;

/// Prints a table per case; the exit code is 0 if all pass.
pub fn run(args: &VerifyArgs, command: &CommandLine) -> Result<ExitCode, Error> {
    let mut passes = true;
    for case in cases::cases(args, &command.families)? {
        let name = format!("{}, in {}", case.name, case.computing.name());
        eprintln!("{name}");
        let report = case.recipe.model.verify(&case, &case.options(args))?;
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
