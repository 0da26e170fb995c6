//! The test suites for the emulated device.

use std::ffi::OsString;
use std::process::Command;

use clap::ValueEnum;

use super::CudaTools;
use crate::binaries::TestBinary;
use crate::temp::TempDir;
use crate::test::run_tests;
use crate::totals::Totals;

/// A test suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// Training steps of small models over several ranks, compared with the CPU, and the number of kernel launches.
    Steps,
    /// The NCCL engine, with ranks that are threads and share the device.
    Nccl,
    /// The memory traffic of each kernel of `burn-megatron-bench kernels`, compared with the minimum.
    Traffic,
    /// Short runs of the command `pretrain` that are saved and resumed. Their losses are compared with the CPU.
    Pretrain,
    /// The tests of burn-megatron-kernels.
    Kernels,
    /// The launches, copies and waits of a training step, within their budgets. Not one of the default suites.
    Step,
}

/// The variable that names the file to which the device writes the counts of each launch.
const COUNTS: &str = "BURN_MEGATRON_EMULATOR_COUNTS";

impl Suite {
    /// The default suites, the short ones first.
    pub const ALL: [Self; 5] = [
        Self::Traffic,
        Self::Steps,
        Self::Nccl,
        Self::Pretrain,
        Self::Kernels,
    ];

    /// The short suites that compare results with the CPU.
    pub const QUICK: [Self; 3] = [Self::Steps, Self::Nccl, Self::Pretrain];

    pub fn name(self) -> &'static str {
        match self {
            Self::Step => "emulated step",
            Self::Steps => "emulated steps",
            Self::Nccl => "emulated nccl",
            Self::Traffic => "emulated traffic",
            Self::Pretrain => "emulated pretrain",
            Self::Kernels => "emulated kernels",
        }
    }

    /// Runs the suite. Tests are counted in `totals`.
    pub fn run(
        self,
        runner: &SuiteRunner,
        arguments: &[OsString],
        totals: &mut Totals,
    ) -> Result<(), String> {
        match self {
            Self::Kernels => {
                let mut tests = runner.tests("burn_megatron_kernels")?;
                run_tests(tests.args(arguments), totals)
            }
            Self::Nccl => {
                let mut run = |name| {
                    let mut tests = runner.tests(name)?;
                    if runner.tools.gpu {
                        tests.env("BURN_MEGATRON_TEST_CUDA", "1");
                    } else {
                        // All ranks share one device.
                        tests
                            .env("BURN_MEGATRON_TEST_CUDA", "emulated")
                            .env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
                    }
                    run_tests(tests.args(or_own(arguments, "nccl")), totals)
                };
                [
                    "burn_megatron_comm",
                    "gpu_context",
                    "gpu_learner",
                    "gpu_overlap",
                    "gpu_graphs",
                ]
                .map(&mut run)
                .into_iter()
                .collect()
            }
            Self::Steps => {
                let folder = counts_folder()?;
                let mut run = |name| {
                    let mut tests = runner.tests(name)?;
                    if reads_counts(name, runner.tools.gpu) {
                        tests.env(COUNTS, folder.path().join("counts.jsonl"));
                    }
                    run_tests(tests.args(arguments), totals)
                };
                let all = [
                    "gpu",
                    "gpu_zero",
                    "gpu_memory",
                    "gpu_context",
                    "gpu_launches",
                    "gpu_algorithms",
                    "gpu_deferred",
                    "gpu_learner",
                    "gpu_overlap",
                    "gpu_graphs",
                ]
                .map(&mut run);
                all.into_iter().collect()
            }
            Self::Step => {
                let folder = counts_folder()?;
                let mut tests = runner.tests("gpu_step")?;
                let tests = tests
                    .env(COUNTS, folder.path().join("counts.jsonl"))
                    .env("BURN_MEGATRON_EMULATOR_PRODUCTS", "fill")
                    .env("BURN_MEGATRON_EMULATOR_CLOCK", "fixed")
                    .env("BURN_MEGATRON_EMULATOR_CHECKS", "none")
                    .env("BURN_MEGATRON_EMULATOR_MEMORY", "64");
                run_tests(tests.args(arguments).arg("--nocapture"), totals)
            }
            Self::Traffic => {
                let folder = counts_folder()?;
                let mut tests = runner.tests("burn_megatron_cli")?;
                let tests = tests.env(COUNTS, folder.path().join("counts.jsonl"));
                let tests = tests.args(or_own(arguments, "kernel_cases::traffic"));
                run_tests(tests.arg("--nocapture"), totals)
            }
            Self::Pretrain => {
                let mut tests = runner.tests("gpu_pretrain")?;
                run_tests(tests.args(arguments), totals)
            }
        }
    }
}

/// Returns whether tests of the suite `steps` read the counts of the emulated device. A GPU writes no counts.
fn reads_counts(tests: &str, gpu: bool) -> bool {
    tests == "gpu_algorithms" && !gpu
}

fn counts_folder() -> Result<TempDir, String> {
    TempDir::new("counts").map_err(|error| format!("a temporary folder: {error}"))
}

/// Returns the given arguments, or the filter of the suite if none are given.
fn or_own(arguments: &[OsString], own: &str) -> Vec<OsString> {
    match arguments {
        [] => vec![own.into()],
        _ => arguments.to_vec(),
    }
}

/// Runs the tests of suites.
pub struct SuiteRunner<'a> {
    pub tools: &'a CudaTools,
    pub built: &'a [TestBinary],
}

impl SuiteRunner<'_> {
    /// Returns a command for the tests of a library or a file, in the folder where cargo runs them.
    fn tests(&self, name: &str) -> Result<Command, String> {
        let found = self.built.iter().find(|tests| tests.name == name);
        let found = found.ok_or_else(|| format!("cargo built no test binary of {name}"))?;
        let mut command = self.tools.command(found.file());
        command
            .current_dir(found.folder())
            .env("INSTA_UPDATE", "no");
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_requested_from_the_emulated_device_alone() {
        assert!(reads_counts("gpu_algorithms", false));
        assert!(!reads_counts("gpu_algorithms", true));
        assert!(!reads_counts("gpu", false));
    }
}
