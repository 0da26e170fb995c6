//! `burn-megatron verify`.

use std::process::ExitCode;

use crate::error::Error;
use crate::family::Families;
use crate::terminal;

use args::VerifyArgs;

mod against;
pub mod args;
mod cases;
mod faults;
mod models;

/// Prints a table per case; the exit code is 0 if all pass.
pub fn run(
    args: &VerifyArgs,
    families: &Families,
    default_recipe: &str,
) -> Result<ExitCode, Error> {
    if args.faults {
        return faults::run();
    }
    if let Some(folder) = &args.against {
        return against::run(folder, args.tolerance, families);
    }
    let mut passes = true;
    for case in cases::cases(args, families, default_recipe)? {
        let name = format!("{}, in {}", case.name, case.computing.name());
        eprintln!("{name}");
        let (model, options) = (&case.recipe.model, case.options(args));
        let report = model.verify(case.subject(), &case.layouts, &options)?;
        println!(
            "{name}\n{}\n",
            terminal::wrapped(&report.fit(terminal::width()))
        );
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
