//! `cargo xtask test`: all tests, on the CPU, where there is MPI with ranks as processes too, and, where
//! there is a driver, through wgpu.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::process::{cargo, run_reading};
use crate::report::{Outcome, Report};
use crate::totals::{Harness, Totals, tests_in};
use crate::{mpi, vulkan};

/// The tests of the whole workspace, on the CPU. Without `--no-fail-fast` cargo would leave out
/// every binary after the first that fails.
const ON_CPU: &[&str] = &["test", "--workspace", "--no-fail-fast"];

/// The tests of what the feature `wgpu` brings: each stands in a file named `gpu*.rs` in one of
/// [`GPU_FOLDERS`]. Their build is also that of the command `kernel-check`: cargo builds everything
/// anew for another choice of packages and features.
pub const ON_WGPU: &[&str] = &[
    "test",
    "--no-fail-fast",
    "-p",
    "burn-megatron-tests",
    "-p",
    "burn-megatron-kernel-check",
    "-p",
    "burn-megatron-kernels",
    "--features",
    "burn-megatron-tests/wgpu,burn-megatron-tests/tracing,burn-megatron-kernel-check/wgpu",
    "--lib",
    "--test",
    "gpu*",
];

/// The tests of what the feature `mpi` brings: each stands in a file named `mpi*.rs`.
const MPI_FOLDERS: [&str; 2] = ["tests/tests", "cli/tests/mpi"];

const GPU_FOLDERS: [&str; 3] = [
    "tests/tests",
    "tools/kernel-check/tests",
    "burn-megatron-kernels/tests",
];

/// Runs every test and hands the totals to the report.
pub fn run(root: &Path, report: &mut Report) {
    let mut totals = Totals::default();
    let mut driver = Ok(());
    report.step("vulkan driver", || {
        driver = vulkan::find_or_install();
        driver
            .clone()
            .map_or_else(Outcome::Skipped, |()| Outcome::Passed)
    });
    let mut processes = Ok(());
    report.step("mpi", || {
        processes = mpi::find_or_install();
        let found = processes.clone();
        found.map_or_else(Outcome::Skipped, |()| Outcome::Passed)
    });
    report.step("tests", || {
        let with_mpi = [ON_CPU, &["--features", mpi::FEATURES]].concat();
        let args = if processes.is_ok() { &with_mpi } else { ON_CPU };
        run_tests(&mut cargo(root, args), &mut totals)
    });
    if processes.is_err() {
        report.step("tests of mpi", || {
            skip(root, &MPI_FOLDERS, "mpi", "MPI", &mut totals)
        });
    }
    report.step("tests on wgpu", || match driver {
        Ok(()) => run_tests(&mut cargo(root, ON_WGPU), &mut totals).into(),
        Err(_) => skip(root, &GPU_FOLDERS, "gpu", "a Vulkan driver", &mut totals),
    });
    report.set_totals(totals);
}

/// Runs test binaries and adds their results to the totals.
pub fn run_tests(command: &mut Command, totals: &mut Totals) -> Result<(), String> {
    let mut harness = Harness::default();
    let result = run_reading(command, |line| harness.read(line));
    let mut here = harness.finish();
    if result.is_err() && here.failed == 0 {
        // Nothing ran, as when it does not compile: count it as a failure.
        here.failed = 1;
    }
    *totals += here;
    result
}

fn skip(root: &Path, folders: &[&str], prefix: &str, wanted: &str, totals: &mut Totals) -> Outcome {
    let mut counts = folders
        .iter()
        .map(|folder| count_tests(&root.join(folder), prefix));
    match counts.try_fold(0, |sum, count| Ok::<_, String>(sum + count?)) {
        Ok(count) => {
            totals.skipped += count;
            Outcome::Skipped(format!("{count} tests, which need {wanted}"))
        }
        Err(reason) => Outcome::Failed(reason),
    }
}

/// The number of tests in the files of a folder whose names begin with `prefix`.
fn count_tests(folder: &Path, prefix: &str) -> Result<usize, String> {
    let unreadable = |path: &Path, e| format!("{}: {e}", path.display());
    let mut count = 0;
    for entry in fs::read_dir(folder).map_err(|e| unreadable(folder, e))? {
        let path = entry.map_err(|e| unreadable(folder, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(prefix) && name.ends_with(".rs") {
            count += tests_in(&fs::read_to_string(&path).map_err(|e| unreadable(&path, e))?);
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    #[test]
    fn only_the_files_of_a_feature_are_counted() {
        let folder = TempDir::new("count").unwrap();
        let test = "#[test]\nfn t() {}\n";
        folder.write("gpu_norm.rs", &test.repeat(2));
        folder.write("gpu.rs", test);
        folder.write("gpu_notes.md", test);
        folder.write("layouts.rs", test);
        folder.write("mpi_run.rs", test);
        assert_eq!(count_tests(folder.path(), "gpu"), Ok(3));
        assert_eq!(count_tests(folder.path(), "mpi"), Ok(1));
    }

    #[test]
    fn a_missing_folder_is_named() {
        let folder = TempDir::new("count").unwrap();
        let error = count_tests(&folder.path().join("gone"), "gpu").unwrap_err();
        assert!(error.contains("gone: "), "{error}");
    }
}
