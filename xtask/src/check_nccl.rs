//! `cargo xtask check-nccl`: checks the NCCL engine against the headers and libraries of NVIDIA's wheels, without a
//! GPU.

use std::env;
use std::path::{Path, PathBuf};

use crate::pip;
use crate::process::target_folder;
use crate::report::{Outcome, Report};
use crate::test;
use crate::totals::Totals;

/// A version of NCCL in a wheel.
struct Version {
    step: &'static str,
    wheel: &'static str,
}

/// The first version that splits communicators, and the latest version whose sources were read.
const VERSIONS: [Version; 2] = [
    Version {
        step: "nccl 2.18",
        wheel: "nvidia-nccl-cu12==2.18.3",
    },
    Version {
        step: "nccl 2.30",
        wheel: "nvidia-nccl-cu13==2.30.7",
    },
];

/// The tests that read a header or open a library. Environment variables give the paths.
const TESTS: [&str; 2] = ["the_header_agrees", "the_real_library_has_all_functions"];

/// Builds the tests of the engine, finds or installs each version, and runs the tests with it.
pub fn run(root: &Path, report: &mut Report) {
    let mut built = Err("the tests were not built".to_string());
    report.step("build of the tests", || {
        built = test::build_programs(root).and_then(|tests| {
            let found = tests
                .into_iter()
                .find(|tests| tests.name == "burn_megatron_comm");
            found.ok_or_else(|| "cargo built no test binary of burn_megatron_comm".into())
        });
        built.as_ref().map(drop).map_err(String::clone)
    });
    let mut totals = Totals::default();
    for version in &VERSIONS {
        report.step(version.step, || {
            let Ok(tests) = &built else {
                return Outcome::Skipped("the build failed".into());
            };
            let checked = target_folder(root)
                .and_then(|target| version.find_or_install(&target))
                .and_then(|folder| {
                    let mut command = tests.command();
                    command
                        .env("BURN_MEGATRON_TEST_NCCL_H", folder.join("include/nccl.h"))
                        .env(
                            "BURN_MEGATRON_TEST_LIBNCCL",
                            folder.join("lib/libnccl.so.2"),
                        )
                        .args(TESTS)
                        .arg("--nocapture");
                    let mut here = Totals::default();
                    let result = test::run_tests(&mut command, &mut here);
                    let ran = here.passed;
                    totals += here;
                    result?;
                    if ran == TESTS.len() {
                        Ok(())
                    } else {
                        Err(format!("{ran} tests ran, expected {}", TESTS.len()))
                    }
                });
            checked.into()
        });
    }
    report.set_totals(totals);
}

impl Version {
    /// Returns the folder with the header and the library of this version.
    fn find_or_install(&self, target: &Path) -> Result<PathBuf, String> {
        if env::consts::OS != "linux" {
            let os = env::consts::OS;
            return Err(format!("NCCL comes as wheels for Linux, and this is {os}"));
        }
        let folder = target
            .join("nccl-wheels")
            .join(self.wheel.replace("==", "-"));
        let nccl = folder.join("nvidia/nccl");
        let is_there = || {
            let files = ["include/nccl.h", "lib/libnccl.so.2"];
            files.iter().all(|file| nccl.join(file).is_file())
        };
        if !is_there() {
            pip::install(&[self.wheel.into()], &folder)?;
        }
        if is_there() {
            Ok(nccl)
        } else {
            Err(format!(
                "pip installed {} into {} without an error, but not NCCL",
                self.wheel,
                folder.display()
            ))
        }
    }
}
