//! Implements `burn-megatron verify --faults`.

use std::process::ExitCode;

use burn_megatron_verify::faults::find_published;

use crate::error::Error;
use crate::terminal;

/// Prints the published defects, and the checks that detect them. The exit code is 0 if all defects are detected.
pub fn run() -> Result<ExitCode, Error> {
    let found = find_published(|fault| eprintln!("{}, {}", fault.defect, fault.layout))?;
    for fault in &found {
        println!("{}\n", terminal::wrapped(&fault.to_string()));
    }
    let count = found.iter().filter(|fault| fault.is_found()).count();
    println!("{count} of {} published defects are found", found.len());
    Ok(if count == found.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
