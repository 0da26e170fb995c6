//! `cargo xtask test`: runs the tests on the CPU. With MPI, ranks also run as processes. With a driver, tests also
//! run through wgpu.
//!
//! Slow tests are ignored (`#[ignore = "slow: .."]`) and run only with `--all`. They cover all of many cases, where
//! other tests cover a few, or wait for long timeouts.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use crate::binaries::{self, TestBinary};
use crate::fuzz_layouts;
use crate::golden;
use crate::process::{cargo, run_reading, target_folder};
use crate::report::{Outcome, Report};
use crate::totals::{Harness, Totals, tests_in};
use crate::{blas, mpi, vulkan};

/// The features of the tests on a GPU device, and of the command `kernel-check`.
const WGPU_FEATURES: &str = "burn-megatron-tests/wgpu,burn-megatron-tests/tracing,burn-megatron-cli/wgpu,\
                             burn-megatron-kernel-check/wgpu,burn-megatron-learner/wgpu";

/// The feature of the command that reads Parquet and Arrow.
pub const PARQUET_FEATURES: &str = "burn-megatron-cli/parquet";

/// Tests that `--all` ignores too: processes that tests start, a measurement, and tests that take too long. The
/// nightly workflow runs the last three.
const SKIPPED: [&str; 10] = [
    "as_a_child",
    "machine::tests::speed",
    "full_product",
    "sixteen_thousand_devices",
    "the_peak_of_every_step",
    "the_published_layout_of_405b",
    "fifty_kills",
    "a_hundred_flips",
    "every_pair_of_settings",
    "attention::tests::every_width",
];

/// Selects the tests to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Extent {
    /// All tests except slow tests.
    Quick,
    /// All tests.
    All,
}

/// The library whose tests all run on the CPU and, with the feature `wgpu`, on a GPU device.
const KERNELS: &str = "burn_megatron_kernels";

/// The groups of tests of this library that run at the same time. In each process, one thread compiles and runs
/// kernels, which takes nearly all of the time. The tests of attention take half of the total time.
const SHARES: [&[&str]; 2] = [&["attention::"], &["--skip", "attention::"]];

/// The number of processes that run tests on the device at the same time.
const DEVICE_PROCESSES: usize = 2;

/// The folders of the tests that need the feature `mpi`. Their files are named `mpi*.rs`.
const MPI_FOLDERS: [&str; 3] = [
    "tests/tests",
    "cli/tests/mpi",
    "burn-megatron-learner/tests",
];

const GPU_FOLDERS: [&str; 4] = [
    "tests/tests",
    "burn-megatron-learner/tests",
    "tools/kernel-check/tests",
    "burn-megatron-kernels/tests",
];

/// Runs the tests and adds the totals to the report.
pub fn run(extent: Extent, root: &Path, report: &mut Report) {
    let mut totals = Totals::default();
    let (mut driver, mut processes) = (Ok(()), Ok(()));
    report.step("vulkan driver", || {
        driver = vulkan::find_or_install();
        driver
            .clone()
            .map_or_else(Outcome::Skipped, |()| Outcome::Passed)
    });
    report.step("mpi", || {
        processes = mpi::find_or_install();
        let found = processes.clone();
        found.map_or_else(Outcome::Skipped, |()| Outcome::Passed)
    });
    report.step("blas", || {
        blas::find_or_install().map_or_else(Outcome::Skipped, |()| Outcome::Passed)
    });
    let features = features(driver.is_ok(), processes.is_ok());
    let mut built = Vec::new();
    report.step("build of the tests", || {
        built = build(root, &features).inspect_err(|_| totals.failed += 1)?;
        Ok::<_, String>(())
    });
    let is_on_device = |tests: &TestBinary| tests.name == KERNELS || tests.name.starts_with("gpu");
    let (on_device, on_cpu): (Vec<_>, Vec<_>) = built
        .iter()
        .partition(|tests| driver.is_ok() && is_on_device(tests));
    report.step("tests", || {
        let jobs = on_cpu.iter().map(|tests| command(tests, extent, &[]));
        run_all(jobs.collect(), 1, &mut totals)
    });
    report.step("tests in docs", || {
        let args = ["test", "--workspace", "--no-fail-fast", "--doc"];
        run_tests(
            cargo(root, &args).args(["--features", &features]),
            &mut totals,
        )
    });
    if processes.is_err() {
        report.step("tests of mpi", || {
            skip(root, &MPI_FOLDERS, "mpi", "MPI", &mut totals)
        });
    }
    report.step("tests on wgpu", || match driver {
        Ok(()) => {
            let shares = |tests: &TestBinary| match tests.name.as_str() {
                KERNELS => SHARES.to_vec(),
                _ => vec![&[][..]],
            };
            let jobs = on_device.iter().flat_map(|tests| {
                let shares = shares(tests).into_iter();
                shares.map(|share| command(tests, extent, share))
            });
            run_all(jobs.collect(), DEVICE_PROCESSES, &mut totals).into()
        }
        Err(_) => skip(root, &GPU_FOLDERS, "gpu", "a Vulkan driver", &mut totals),
    });
    if extent == Extent::All {
        report.step("fuzz-layouts", || {
            let name = format!("debug/burn-megatron{}", std::env::consts::EXE_SUFFIX);
            fuzz_layouts::run_with_tests(&target_folder(root)?.join(name))
        });
        golden::check_with_tests(root, report);
    }
    report.set_totals(totals);
}

/// Returns the features of all tests that can run here. All builds use the same features, so that cargo builds the
/// dependencies once.
fn features(wgpu: bool, mpi: bool) -> String {
    let chosen = [
        (true, PARQUET_FEATURES),
        (wgpu, WGPU_FEATURES),
        (mpi, mpi::FEATURES),
    ];
    let chosen: Vec<_> = chosen
        .iter()
        .filter_map(|(is_here, features)| is_here.then_some(*features))
        .collect();
    chosen.join(",")
}

/// Builds the tests and the programs of the whole workspace.
fn build(root: &Path, features: &str) -> Result<Vec<TestBinary>, String> {
    let what = ["build", "--workspace", "--tests", "--bins", "--features"];
    binaries::build(cargo(root, &[&what[..], &[features]].concat()))
}

/// Builds all programs in the dev profile together with the tests, which need the same dependencies. Returns the
/// tests.
pub fn build_programs(root: &Path) -> Result<Vec<TestBinary>, String> {
    build(root, &features(true, mpi::missing().is_empty()))
}

/// Returns a command for the tests of one binary. It prints the time of each test where possible: this is an unstable
/// option of the harness.
fn command(tests: &TestBinary, extent: Extent, share: &[&str]) -> Command {
    let mut command = tests.command();
    command
        .env("RUSTC_BOOTSTRAP", "1")
        .args(harness_args(extent))
        .args(share);
    command
}

/// Runs test binaries on `workers` threads. All binaries run, even if one fails. The error is the first error.
fn run_all(jobs: VecDeque<Command>, workers: usize, totals: &mut Totals) -> Result<(), String> {
    let (jobs, totals) = (Mutex::new(jobs), Mutex::new(totals));
    let work = || {
        let mut result = Ok(());
        loop {
            let Some(mut job) = jobs.lock().expect("a worker panicked").pop_front() else {
                return result;
            };
            let mut own = Totals::default();
            let of_job = run_tests(&mut job, &mut own);
            **totals.lock().expect("a worker panicked") += own;
            result = result.and(of_job);
        }
    };
    thread::scope(|scope| {
        let started: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let results = started
            .into_iter()
            .map(|worker| worker.join().expect("a worker panicked"));
        results.fold(Ok(()), Result::and)
    })
}

fn harness_args(extent: Extent) -> Vec<&'static str> {
    let mut args = SKIPPED.map(|name| ["--skip", name]).concat();
    if extent == Extent::All {
        args.push("--include-ignored");
    }
    args.extend(["-Zunstable-options", "--report-time"]);
    args
}

/// Runs test binaries and adds their results to the totals.
pub fn run_tests(command: &mut Command, totals: &mut Totals) -> Result<(), String> {
    let mut harness = Harness::default();
    let result = run_reading(command, |line| harness.read(line));
    let mut here = harness.finish();
    if result.is_err() && here.failed == 0 {
        // Nothing ran, for example because the tests do not compile. This counts as a failure.
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

/// Returns the number of tests in the files of a folder whose names begin with `prefix`.
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
    use burn_megatron_test_support::skipped;

    use super::*;
    use crate::temp::TempDir;
    use crate::words::tracked_files;

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

    /// Checks that main.rs or Cargo.toml names every file of tests. Any other file would be ignored silently.
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

    /// Checks that every skipped test exists. The name of a missing test would be ignored silently.
    #[test]
    fn every_skipped_test_exists() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let Ok(files) = tracked_files(root) else {
            return skipped("git does not list the files here");
        };
        let sources = files.iter().filter(|file| file.ends_with(".rs"));
        let sources: Vec<_> = sources
            .filter_map(|file| fs::read_to_string(root.join(file)).ok())
            .collect();
        for name in SKIPPED {
            let function = format!("fn {}", name.rsplit("::").next().unwrap());
            assert!(
                sources.iter().any(|text| text.contains(&function)),
                "{name}"
            );
        }
    }

    #[test]
    fn a_missing_folder_is_named() {
        let folder = TempDir::new("count").unwrap();
        let error = count_tests(&folder.path().join("gone"), "gpu").unwrap_err();
        assert!(error.contains("gone: "), "{error}");
    }
}
