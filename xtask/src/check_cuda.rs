//! `cargo xtask check-cuda`: compiles every CUDA kernel to machine code, without a GPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::process::{run as run_command, target_folder};
use crate::report::{Outcome, Report};
use crate::{test, wheels};

/// The command that compiles and checks the kernels.
const PROGRAM: &str = "kernel-check";

/// The kernels to compile, and the architectures to compile them for.
#[derive(Args, Default)]
pub struct Options {
    /// Compile for this architecture only: sm_80, sm_90a or sm_100a. May be repeated. By default, sm_90a compiles
    /// every type. The other architectures skip the f32 and f16 versions of kernels that also exist in bf16.
    #[arg(long, value_name = "ARCH")]
    arch: Vec<String>,
    /// Compile only kernels whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Write the files of every kernel (CUDA C++, PTX, cubin, SASS) to this folder. The default is cuda-kernels in
    /// the target folder.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

impl Options {
    /// Returns the options that compile every kernel in every type for one architecture. The other architectures
    /// double the time.
    pub fn of_ci() -> Self {
        Self {
            arch: vec!["sm_90a".into()],
            ..Self::default()
        }
    }
}

/// Whether missing compilers are an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compilers {
    /// Without compilers the check fails.
    Needed,
    /// Without compilers the check is skipped.
    Optional,
}

impl Compilers {
    /// Returns the outcome of the step that finds or installs the compilers.
    pub fn outcome<T>(self, found: &Result<T, String>) -> Outcome {
        match (found, self) {
            (Ok(_), _) => Outcome::Passed,
            (Err(reason), Self::Needed) => Outcome::Failed(reason.clone()),
            (Err(reason), Self::Optional) => Outcome::Skipped(reason.clone()),
        }
    }
}

/// Finds or installs the compilers, then compiles and checks the kernels.
pub fn run(options: &Options, compilers: Compilers, root: &Path, report: &mut Report) {
    let mut found = Err("the CUDA compilers were not looked for".to_owned());
    report.step("cuda compilers", || {
        found = target_folder(root).and_then(|target| {
            let wheels = wheels::folder(&target);
            wheels::find_or_install(&wheels).map(|()| (target, wheels))
        });
        compilers.outcome(&found)
    });
    report.step("cuda kernels", || match &found {
        Ok((target, wheels)) => check(options, root, target, wheels).into(),
        Err(_) => Outcome::Skipped("the compilers are missing".into()),
    });
}

fn check(options: &Options, root: &Path, target: &Path, wheels: &Path) -> Result<(), String> {
    test::build_programs(root)?;
    let program = target.join("debug").join(PROGRAM);
    let default = target.join("cuda-kernels");
    let keep = options.keep.as_deref().unwrap_or(&default);
    run_command(&mut kernel_check(&program, options, wheels, keep))
}

fn kernel_check(program: &Path, options: &Options, wheels: &Path, keep: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("--wheels").arg(wheels).arg("--keep").arg(keep);
    for arch in &options.arch {
        command.args(["--arch", arch]);
    }
    if let Some(only) = &options.only {
        command.args(["--only", only]);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_passed_on() {
        let options = Options {
            arch: vec!["sm_80".into(), "sm_90a".into()],
            only: Some("norm/".into()),
            keep: None,
        };
        let [program, wheels, keep] = ["/kernel-check", "/wheels", "/keep"].map(Path::new);
        let command = kernel_check(program, &options, wheels, keep);
        let words: Vec<_> = command
            .get_args()
            .map(|word| word.to_string_lossy())
            .collect();
        let expected = "--wheels /wheels --keep /keep --arch sm_80 --arch sm_90a --only norm/";
        assert_eq!(words.join(" "), expected);
    }
}
