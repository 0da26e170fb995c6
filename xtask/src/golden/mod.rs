//! `cargo xtask golden`: records the results of small runs, plans and kernel sources, and compares with the record.
//!
//! A refactoring must not change a result. `record` writes the results into `xtask/golden/`. `check` compares with
//! them:
//!
//! - `runs.tsv` lists runs of 12 steps. `values.json` contains their losses and gradient norms. `bits/NAME.json`
//!   contains the hashes of their files on the processor NAME.
//! - `plans.json` contains the plan of each recipe in `examples/recipes`: parameters, FLOPs, memory by kind, times.
//! - `kernels.json` contains the hash of the CUDA C++ source of each kernel.

mod kernels;
mod plans;
mod processor;
mod records;
mod runs;

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::Value;

use crate::differences;
use crate::process::target_folder;
use crate::report::Report;
use crate::test;

use runs::GoldenRun;

/// The folder of the records, relative to the repository.
const FOLDER: &str = "xtask/golden";

/// The maximum relative difference of a planned number. Its logarithms and roots come from the C library.
const PLANS_BOUND: f64 = 1e-12;

/// The options of `cargo xtask golden`.
#[derive(Args)]
pub struct Options {
    #[command(subcommand)]
    action: Action,
    /// Use this burn-megatron program instead of the program that the tests have built.
    #[arg(long, value_name = "FILE", global = true)]
    program: Option<PathBuf>,
    /// Use this kernel-check program instead of the program that the tests have built.
    #[arg(long, value_name = "FILE", global = true)]
    kernel_check: Option<PathBuf>,
}

/// Whether results are recorded or compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand)]
enum Action {
    /// Write the results. The bits of other processors are kept only if the values are unchanged.
    Record,
    /// Compare with the recorded results.
    Check,
}

/// The programs whose results are compared.
struct Programs {
    command: PathBuf,
    kernel_check: PathBuf,
}

/// Builds the programs, and records or checks the results.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    let mut programs = None;
    report.step("golden, programs", || {
        programs = Some(build(options, root)?);
        Ok::<_, String>(())
    });
    if let Some(programs) = programs {
        run_all(options.action, &programs, root, report);
    }
}

/// Checks the results with the programs that the tests have built.
pub fn check_with_tests(root: &Path, report: &mut Report) {
    match built_with_tests(root) {
        Ok(programs) => run_all(Action::Check, &programs, root, report),
        Err(error) => report.step("golden", || Err::<(), _>(error)),
    }
}

fn build(options: &Options, root: &Path) -> Result<Programs, String> {
    if options.program.is_none() || options.kernel_check.is_none() {
        test::build_programs(root)?;
    }
    let built = built_with_tests(root)?;
    Ok(Programs {
        command: options.program.clone().unwrap_or(built.command),
        kernel_check: options.kernel_check.clone().unwrap_or(built.kernel_check),
    })
}

fn built_with_tests(root: &Path) -> Result<Programs, String> {
    let folder = target_folder(root)?.join("debug");
    let program = |name: &str| folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    Ok(Programs {
        command: program("burn-megatron"),
        kernel_check: program("kernel-check"),
    })
}

fn run_all(action: Action, programs: &Programs, root: &Path, report: &mut Report) {
    let folder = root.join(FOLDER);
    report.step("golden runs", || {
        let runs = GoldenRun::parse(&read_text(&folder.join("runs.tsv"))?)?;
        let results = runs::results(&runs, &programs.command, root)?;
        match action {
            Action::Record => records::write(&folder, &runs, &results),
            Action::Check => records::check(&folder, &runs, &results),
        }
    });
    report.step("golden plans", || {
        let found = plans::of_recipes(&programs.command, root)?;
        compare_or_write(action, &folder.join("plans.json"), &found, PLANS_BOUND)
    });
    report.step("golden kernels", || {
        let found = kernels::hashes(&programs.kernel_check)?;
        compare_or_write(action, &folder.join("kernels.json"), &found, 0.0)
    });
}

fn compare_or_write(action: Action, path: &Path, found: &Value, bound: f64) -> Result<(), String> {
    match action {
        Action::Record => write_json(path, found),
        Action::Check => differences::within(&read_json(path)?, found, |_| bound),
    }
}

fn read_text(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

fn read_json(path: &Path) -> Result<Value, String> {
    serde_json::from_str(&read_text(path)?).map_err(|e| format!("{}: {e}", path.display()))
}

fn write_json(path: &Path, value: &Value) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    fs::write(path, format!("{value:#}\n")).map_err(failed)?;
    println!("{} written", path.display());
    Ok(())
}
