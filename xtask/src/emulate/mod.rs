//! `cargo xtask emulate`: runs the CUDA build without a GPU, on the emulated GPU.

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
use crate::process::{commit, target_folder};
use crate::report::{Outcome, Report};
use crate::totals::Totals;
use crate::wheels;
use suite::{Suite, SuiteRunner};

/// The suites to run.
#[derive(Args, Default)]
pub struct Options {
    /// Suites to run. By default all suites except `step`.
    #[arg(value_enum, value_name = "SUITE")]
    suites: Vec<Suite>,
    /// Run only the suites `steps`, `nccl` and `pretrain`, as the nightly workflow does.
    #[arg(long, conflicts_with = "suites")]
    quick: bool,
    /// Arguments of the tests, such as a part of their names or `--test-threads`.
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

/// The folders of the CUDA tools.
struct CudaTools {
    target: PathBuf,
    wheels: PathBuf,
    /// Whether programs use the GPU of this machine instead of the emulated GPU.
    gpu: bool,
    /// The folder that resembles a CUDA installation, with the emulator and headers.
    cuda: PathBuf,
}

/// Finds or installs the compilers, builds the emulator and the programs of the suites, and runs the suites.
pub fn run(options: &Options, compilers: Compilers, root: &Path, report: &mut Report) {
    let mut found = Err("the CUDA compilers were not looked for".to_owned());
    report.step("cuda compilers", || {
        found = find(root, false);
        compilers.outcome(&found)
    });
    let Ok(tools) = found else {
        report.step("emulated device", || {
            Outcome::Skipped("the compilers are missing".into())
        });
        return;
    };
    report.step("emulator", || build::emulator(root, &tools));
    run_suites(options.chosen(), &options.arguments, &tools, root, report);
    println!("\nemulated at commit {}", commit(root));
}

/// Runs the suites on the GPU of this machine, except the suites that need the counts of the emulator.
pub fn run_on_gpu(root: &Path, report: &mut Report) {
    let mut found = Err("the CUDA compilers were not looked for".to_owned());
    report.step("cuda compilers", || {
        found = find(root, true).and_then(|tools| {
            build::headers_folder(&tools)?;
            Ok(tools)
        });
        found.as_ref().map(drop).map_err(Clone::clone)
    });
    let Ok(tools) = found else { return };
    let mut suites = Suite::ALL.to_vec();
    suites.retain(|suite| *suite != Suite::Traffic);
    run_suites(&suites, &[], &tools, root, report);
}

/// Builds `burn-megatron` for CUDA and `burn-megatron-bench` in the same folder, with optimization and without LLVM.
pub fn build_command_for_cuda(root: &Path) -> Result<PathBuf, String> {
    build::command(root, &target_folder(root)?)
}

/// Returns a command for the GPU of this machine that uses the compilers of `check-cuda`. If they are missing, the
/// command uses the compilers of the machine.
pub fn command_on_gpu(program: &Path, root: &Path) -> Command {
    let tools = find(root, true).and_then(|tools| {
        build::headers_folder(&tools)?;
        Ok(tools)
    });
    match tools {
        Ok(tools) => tools.command(program),
        Err(reason) => {
            println!("without the compilers of check-cuda: {reason}");
            Command::new(program)
        }
    }
}

fn run_suites(
    suites: &[Suite],
    arguments: &[OsString],
    tools: &CudaTools,
    root: &Path,
    report: &mut Report,
) {
    let mut built = Err(String::new());
    report.step("build for cuda", || {
        built = build::tests(root, tools);
        built.as_ref().map(drop).map_err(Clone::clone)
    });
    let mut totals = Totals::default();
    for suite in suites {
        let name = if tools.gpu {
            suite.name().trim_start_matches("emulated ")
        } else {
            suite.name()
        };
        report.step(name, || {
            let Ok(built) = &built else {
                return Outcome::Skipped("the build failed".into());
            };
            let runner = SuiteRunner { tools, built };
            let mut here = Totals::default();
            let result = suite.run(&runner, arguments, &mut here);
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
    report.set_totals(totals);
}

impl Options {
    fn chosen(&self) -> &[Suite] {
        match self.suites.as_slice() {
            [] if self.quick => &Suite::QUICK,
            [] => &Suite::ALL,
            chosen => chosen,
        }
    }
}

fn find(root: &Path, gpu: bool) -> Result<CudaTools, String> {
    if env::consts::OS != "linux" {
        let os = env::consts::OS;
        return Err(format!("the emulator needs Linux, not {os}"));
    }
    let target = target_folder(root)?;
    let wheels = wheels::folder(&target);
    wheels::find_or_install(&wheels)?;
    // The path is absolute, because tests run in another folder.
    let wheels =
        fs::canonicalize(&wheels).map_err(|error| format!("{}: {error}", wheels.display()))?;
    let cuda = build::folder(&target);
    Ok(CudaTools {
        target,
        wheels,
        gpu,
        cuda,
    })
}

impl CudaTools {
    /// Returns a command for a program that opens the emulator in place of CUDA. On a GPU, the program finds only the
    /// headers and NVRTC.
    fn command(&self, program: &Path) -> Command {
        let mut folders = vec![self.wheels.join("nvidia/cuda_nvrtc/lib")];
        let mut command = Command::new(program);
        if !self.gpu {
            folders.insert(0, self.cuda.clone());
            // Times on an emulated device do not show which kernel is the fastest.
            command.env("CUBECL_AUTOTUNE_LEVEL", "minimal");
        }
        command
            .env("LD_LIBRARY_PATH", search_path(&folders))
            .env("CUDA_PATH", &self.cuda);
        command
    }
}

/// Returns a search path with these folders before the folders of `LD_LIBRARY_PATH`.
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
        let first = |gpu: bool| {
            let tools = CudaTools {
                wheels: "/wheels".into(),
                target: "/target".into(),
                cuda: "/target/emulator".into(),
                gpu,
            };
            let command = tools.command(Path::new("/k-1"));
            let mut set = command.get_envs();
            let path = set.find(|(name, _)| *name == "LD_LIBRARY_PATH");
            let path = path.and_then(|(_, value)| value).unwrap();
            let first: Vec<_> = env::split_paths(path).take(2).collect();
            first
        };
        let nvrtc = Path::new("/wheels/nvidia/cuda_nvrtc/lib");
        assert_eq!(first(false), [Path::new("/target/emulator"), nvrtc]);
        // On a GPU, the emulator is not in the search path.
        assert_eq!(first(true)[0], nvrtc);
        assert!(!first(true).contains(&PathBuf::from("/target/emulator")));
    }

    #[test]
    fn everything_is_run_where_nothing_is_chosen() {
        assert_eq!(Options::default().chosen(), Suite::ALL);
        let quick = Options {
            quick: true,
            ..Options::default()
        };
        assert_eq!(quick.chosen(), Suite::QUICK);
        let nccl = Options {
            suites: vec![Suite::Nccl],
            ..Options::default()
        };
        assert_eq!(nccl.chosen(), [Suite::Nccl]);
    }
}
