//! `cargo xtask test`: the tests, on the CPU, where there is MPI with ranks as processes too, and, where
//! there is a driver, through wgpu.
//!
//! Slow tests are ignored (`#[ignore = "slow: .."]`) and run with `--all` only: they sweep many cases, of which
//! other tests take a few, or wait for long timeouts.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::process::{cargo, run_reading};
use crate::report::{Outcome, Report};
use crate::totals::{Harness, Totals, tests_in};
use crate::{mpi, vulkan};

/// The tests of the whole workspace, on the CPU. Without `--no-fail-fast` cargo would leave out
/// every binary after the first that fails.
const ON_CPU: &[&str] = &["test", "--workspace", "--no-fail-fast", "--tests"];

/// The tests in documentation. rustdoc runs them, and would refuse the unstable option of the others.
const IN_DOCS: &[&str] = &["test", "--workspace", "--no-fail-fast", "--doc"];

/// Times of single tests are an unstable option of the harness, which this variable allows. The runner sets it:
/// set for cargo it would change the build.
const RUNNER: &str = r#"target."cfg(unix)".runner=["env","RUSTC_BOOTSTRAP=1"]"#;

/// Ignored, and no tests: processes that tests start, and a measurement.
const NO_TESTS: [&str; 2] = ["as_a_child", "machine::tests::speed"];

/// Which tests run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Extent {
    /// All but slow ones.
    Quick,
    /// All.
    All,
}

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

/// The shares of these tests that run at the same time: of each process one thread compiles and runs kernels, which is
/// nearly all that they do, and attention takes half of it.
const SHARES: [&[&str]; 2] = [&["attention::"], &["--skip", "attention::"]];

/// The tests of what the feature `mpi` brings: each stands in a file named `mpi*.rs`.
const MPI_FOLDERS: [&str; 2] = ["tests/tests", "cli/tests/mpi"];

const GPU_FOLDERS: [&str; 3] = [
    "tests/tests",
    "tools/kernel-check/tests",
    "burn-megatron-kernels/tests",
];

/// Runs the tests and hands the totals to the report.
pub fn run(extent: Extent, root: &Path, report: &mut Report) {
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
    let features: &[&str] = match processes {
        Ok(()) => &["--features", mpi::FEATURES],
        Err(_) => &[],
    };
    report.step("tests", || {
        let args = [ON_CPU, features].concat();
        run_timed(root, &args, &harness_args(extent), &mut totals)
    });
    report.step("tests in docs", || {
        let args = [IN_DOCS, features].concat();
        run_tests(&mut cargo(root, &args), &mut totals)
    });
    if processes.is_err() {
        report.step("tests of mpi", || {
            skip(root, &MPI_FOLDERS, "mpi", "MPI", &mut totals)
        });
    }
    report.step("tests on wgpu", || match driver {
        Ok(()) => run_shares(root, extent, &mut totals).into(),
        Err(_) => skip(root, &GPU_FOLDERS, "gpu", "a Vulkan driver", &mut totals),
    });
    report.set_totals(totals);
}

/// Runs tests by cargo, where possible with the time of each, and adds their results to the totals.
fn run_timed(
    root: &Path,
    args: &[&str],
    harness_args: &[&str],
    totals: &mut Totals,
) -> Result<(), String> {
    let mut command = cargo(root, args);
    if cfg!(unix) {
        command.args(["--config", RUNNER]);
    }
    command.arg("--").args(harness_args);
    run_tests(&mut command, totals)
}

/// Runs the tests on wgpu in as many processes as there are [`SHARES`]. The second waits while the first builds:
/// cargo locks the target folder until then.
fn run_shares(root: &Path, extent: Extent, totals: &mut Totals) -> Result<(), String> {
    let run = |share: &[&str]| {
        let (args, mut own) = (harness_args(extent), Totals::default());
        let result = run_timed(root, ON_WGPU, &[&args, share].concat(), &mut own);
        (result, own)
    };
    let finished = std::thread::scope(|scope| {
        let started = SHARES.map(|share| scope.spawn(move || run(share)));
        started.map(|share| share.join().expect("a share of the tests panicked"))
    });
    let results = finished.map(|(result, own)| {
        *totals += own;
        result
    });
    results.into_iter().collect()
}

fn harness_args(extent: Extent) -> Vec<&'static str> {
    let mut args = NO_TESTS.map(|name| ["--skip", name]).concat();
    if extent == Extent::All {
        args.push("--include-ignored");
    }
    if cfg!(unix) {
        args.extend(["-Zunstable-options", "--report-time"]);
    }
    args
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

    /// A file of tests that no main.rs and no Cargo.toml names would not run, without a word.
    #[test]
    fn every_file_of_tests_is_built() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for folder in ["tests", "cli"].map(|package| root.join(package)) {
            let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
            let main = fs::read_to_string(folder.join("tests/main.rs")).unwrap();
            for entry in fs::read_dir(folder.join("tests")).unwrap() {
                let path = entry.unwrap().path();
                let holds = |file: &str| path.join(file).is_file();
                let is_data = path.is_dir() && !holds("mod.rs") && !holds("main.rs");
                let name = path.file_stem().unwrap().to_string_lossy();
                let is_module = main.lines().any(|line| line == format!("mod {name};"));
                let is_binary = [".rs", "/main.rs"]
                    .iter()
                    .any(|end| manifest.contains(&format!("path = \"tests/{name}{end}\"")));
                assert!(is_data || is_module || is_binary, "{}", path.display());
            }
        }
    }

    #[test]
    fn a_missing_folder_is_named() {
        let folder = TempDir::new("count").unwrap();
        let error = count_tests(&folder.path().join("gone"), "gpu").unwrap_err();
        assert!(error.contains("gone: "), "{error}");
    }
}
