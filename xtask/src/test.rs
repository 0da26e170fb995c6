//! `cargo xtask test`: all tests, on the CPU and, where there is a driver, through wgpu.

use std::fs;
use std::path::Path;

use crate::process::{cargo, run_reading};
use crate::report::{Outcome, Report};
use crate::totals::{Harness, Totals, tests_in};
use crate::vulkan;

/// The tests of the whole workspace, on the CPU. Without `--no-fail-fast` cargo would leave out
/// every binary after the first that fails.
const ON_CPU: &[&str] = &["test", "--workspace", "--no-fail-fast"];

/// The tests of what the feature `wgpu` brings: each stands in a file named `wgpu*.rs` in one of
/// [`WGPU_FOLDERS`]. Their build is also that of the command `kernel-check`: cargo builds everything
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
    "wgpu*",
];

const WGPU_FOLDERS: [&str; 3] = [
    "tests/tests",
    "kernel-check/tests",
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
            .map_or_else(Outcome::LeftOut, |()| Outcome::Passed)
    });
    report.step("tests", || run_tests(root, ON_CPU, &mut totals));
    report.step("tests on wgpu", || match driver {
        Ok(()) => run_tests(root, ON_WGPU, &mut totals).into(),
        Err(_) => leave_out(root, &mut totals),
    });
    report.set_totals(totals);
}

fn run_tests(root: &Path, args: &[&str], totals: &mut Totals) -> Result<(), String> {
    let mut harness = Harness::default();
    let result = run_reading(&mut cargo(root, args), |line| harness.read(line));
    let mut here = harness.finish();
    if result.is_err() && here.failed == 0 {
        // Nothing ran, as when it does not compile: the totals must not look clean.
        here.failed = 1;
    }
    *totals += here;
    result
}

fn leave_out(root: &Path, totals: &mut Totals) -> Outcome {
    let counts = WGPU_FOLDERS.map(|folder| count_wgpu_tests(&root.join(folder)));
    match counts.into_iter().sum::<Result<usize, String>>() {
        Ok(count) => {
            totals.skipped += count;
            Outcome::LeftOut(format!("{count} tests, for want of a Vulkan driver"))
        }
        Err(reason) => Outcome::Failed(reason),
    }
}

/// The number of tests in the files of a folder whose names begin with `wgpu`.
fn count_wgpu_tests(folder: &Path) -> Result<usize, String> {
    let unreadable = |path: &Path, e| format!("{}: {e}", path.display());
    let mut count = 0;
    for entry in fs::read_dir(folder).map_err(|e| unreadable(folder, e))? {
        let path = entry.map_err(|e| unreadable(folder, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("wgpu") && name.ends_with(".rs") {
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
    fn only_wgpu_files_are_counted() {
        let folder = TempDir::new("count").unwrap();
        let test = "#[test]\nfn t() {}\n";
        folder.write("wgpu_norm.rs", &test.repeat(2));
        folder.write("wgpu.rs", test);
        folder.write("wgpu_notes.md", test);
        folder.write("layouts.rs", test);
        assert_eq!(count_wgpu_tests(folder.path()), Ok(3));
    }

    #[test]
    fn a_missing_folder_is_named() {
        let folder = TempDir::new("count").unwrap();
        let error = count_wgpu_tests(&folder.path().join("gone")).unwrap_err();
        assert!(error.contains("gone: "), "{error}");
    }
}
