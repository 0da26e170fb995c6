//! `cargo xtask emulate`: runs the CUDA build without a GPU, on the emulated one.

mod build;
mod linker;
mod suite;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::check_cuda::Compilers;
use crate::process::target_folder;
use crate::report::{Outcome, Report};
use crate::totals::Totals;
use crate::wheels;
use suite::{Suite, SuiteRunner};

/// The suites to run.
#[derive(Args, Default)]
pub struct Options {
    /// Suites; all but `step` by default.
    #[arg(value_enum, value_name = "SUITE")]
    suites: Vec<Suite>,
    /// Arguments of the tests: a part of their names, `--test-threads`.
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

/// The folders of the CUDA tools.
struct CudaTools {
    target: PathBuf,
    wheels: PathBuf,
    /// The folder that looks like CUDA: the emulator, and headers.
    cuda: PathBuf,
}

/// Finds or installs the compilers, builds the emulator and what is to run, then runs it.
pub fn run(options: &Options, compilers: Compilers, root: &Path, report: &mut Report) {
    let mut found = Err("the CUDA compilers were not looked for".to_owned());
    report.step("cuda compilers", || {
        found = find(root);
        compilers.outcome(&found)
    });
    let Ok(tools) = found else {
        report.step("emulated device", || {
            Outcome::Skipped("the compilers are missing".into())
        });
        return;
    };
    let mut built = Err(String::new());
    report.step("emulator", || build::emulator(root, &tools));
    report.step("build for cuda", || {
        built = build::tests(root, &tools);
        built.as_ref().map(drop).map_err(Clone::clone)
    });
    let mut totals = Totals::default();
    for suite in options.chosen() {
        report.step(suite.name(), || {
            let Ok(built) = &built else {
                return Outcome::Skipped("the build failed".into());
            };
            let runner = SuiteRunner {
                root,
                tools: &tools,
                built,
            };
            let mut here = Totals::default();
            let result = suite.run(&runner, &options.arguments, &mut here);
            let found = here.passed + here.failed > 0;
            totals += here;
            result
                .and_then(|()| {
                    if found {
                        Ok(())
                    } else {
                        Err("no test has this name".into())
                    }
                })
                .into()
        });
    }
    print!("{}", totals.skip_messages());
    println!("{totals}");
}

impl Options {
    fn chosen(&self) -> &[Suite] {
        match self.suites.as_slice() {
            [] => &Suite::ALL,
            chosen => chosen,
        }
    }
}

fn find(root: &Path) -> Result<CudaTools, String> {
    if env::consts::OS != "linux" {
        let os = env::consts::OS;
        return Err(format!("the emulator needs Linux, not {os}"));
    }
    let target = target_folder(root)?;
    let wheels = wheels::folder(&target);
    wheels::find_or_install(&wheels)?;
    // An absolute path, as tests run in another folder.
    let wheels =
        fs::canonicalize(&wheels).map_err(|error| format!("{}: {error}", wheels.display()))?;
    let cuda = target.join("emulator");
    Ok(CudaTools {
        target,
        wheels,
        cuda,
    })
}

impl CudaTools {
    /// A program that finds the emulator where it looks for CUDA.
    fn command(&self, program: &Path) -> Command {
        let folders = [self.cuda.clone(), self.wheels.join("nvidia/cuda_nvrtc/lib")];
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", search_path(&folders))
            .env("CUDA_PATH", &self.cuda)
            // Times on an emulated device do not tell which kernel is the fastest.
            .env("CUBECL_AUTOTUNE_LEVEL", "minimal");
        command
    }
}

/// Folders that come before those that are searched anyway.
fn search_path(folders: &[PathBuf]) -> OsString {
    let before = env::var_os("LD_LIBRARY_PATH");
    let before = before.iter().flat_map(env::split_paths);
    let all = folders.iter().cloned().chain(before);
    env::join_paths(all).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_find_the_emulator_before_a_driver() {
        let tools = CudaTools {
            wheels: "/wheels".into(),
            target: "/target".into(),
            cuda: "/target/emulator".into(),
        };
        let command = tools.command(Path::new("/k-1"));
        let path = command
            .get_envs()
            .find(|(name, _)| *name == "LD_LIBRARY_PATH")
            .and_then(|(_, value)| value)
            .unwrap();
        let first: Vec<_> = env::split_paths(path).take(2).collect();
        let nvrtc = Path::new("/wheels/nvidia/cuda_nvrtc/lib");
        assert_eq!(first, [tools.cuda.as_path(), nvrtc]);
    }

    #[test]
    fn everything_is_run_where_nothing_is_chosen() {
        assert_eq!(Options::default().chosen(), Suite::ALL);
        let nccl = Options {
            suites: vec![Suite::Nccl],
            ..Options::default()
        };
        assert_eq!(nccl.chosen(), [Suite::Nccl]);
    }
}
