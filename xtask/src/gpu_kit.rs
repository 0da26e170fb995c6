//! `cargo xtask gpu-kit`: packs an archive that measures burn-megatron on a machine with an NVIDIA GPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde_json::json;

use crate::emulate;
use crate::process::{commit, copy_folder, run as run_command, target_folder};
use crate::report::{Outcome, Report};

/// The content of the kit.
#[derive(Args)]
pub struct Options {
    /// The archive to write.
    #[arg(long, value_name = "FILE", default_value = "gpu-kit.tar.xz")]
    out: PathBuf,
    /// Pack this burn-megatron instead of building it. It must be a CUDA build in the release profile, with
    /// burn-megatron-bench in the same folder.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Test binaries that run without the source tree, such as the tests of burn-megatron-kernels. Call 3 runs them.
    #[arg(long, value_delimiter = ',', value_name = "FILE,..")]
    tests: Vec<PathBuf>,
}

/// The folder of the scripts, and the name of the folder in the archive.
const FOLDER: &str = "gpu-kit";
/// The command and the benchmark program, which lies in the same folder.
const PROGRAMS: [&str; 2] = ["burn-megatron", "burn-megatron-bench"];
const MAX_BYTES: u64 = 50 << 20;

/// Builds the programs unless they are given, then packs the kit.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    let mut staged = Err("the program is missing".to_owned());
    report.step("gpu kit", || {
        let program = match &options.program {
            Some(program) => program.clone(),
            None => emulate::build_command_for_cuda(root)?,
        };
        staged = stage(root, &program, &options.tests);
        staged.as_ref().map(drop).map_err(Clone::clone)
    });
    report.step("archive", || match &staged {
        Ok(folder) => Outcome::from(pack(folder, &options.out)),
        Err(_) => Outcome::Skipped("there is no kit".into()),
    });
}

/// Fills the folder of the kit in the target folder, and returns this folder.
pub fn stage(root: &Path, program: &Path, tests: &[PathBuf]) -> Result<PathBuf, String> {
    let folder = target_folder(root)?.join(FOLDER).join(FOLDER);
    stage_in(&folder, root, program, tests)?;
    Ok(folder)
}

fn stage_in(folder: &Path, root: &Path, program: &Path, tests: &[PathBuf]) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(failed)?;
    }
    copy_folder(&root.join("tools").join(FOLDER), folder)?;
    let peer = root.join("burn-megatron-bench/python/torch_step.py");
    fs::copy(&peer, folder.join("torch_step.py"))
        .map_err(|error| format!("{}: {error}", peer.display()))?;
    for name in PROGRAMS {
        strip(&program.with_file_name(name), &folder.join(name))?;
        report_paths(&folder.join(name), root)?;
    }
    for test in tests {
        let name = test
            .file_name()
            .ok_or_else(|| format!("--tests {}: expected a file", test.display()))?;
        fs::create_dir_all(folder.join("tests")).map_err(failed)?;
        strip(test, &folder.join("tests").join(name))?;
    }
    let about = json!({ "commit": commit(root) });
    fs::write(folder.join("kit.json"), about.to_string()).map_err(failed)
}

fn strip(from: &Path, to: &Path) -> Result<(), String> {
    run_command(Command::new("strip").arg("-o").arg(to).arg(from))
}

/// Prints how often paths of this machine occur in the program. They are source locations in panic messages, and the
/// folder of the default text. The kit opens none of these paths.
fn report_paths(program: &Path, root: &Path) -> Result<(), String> {
    let bytes = fs::read(program).map_err(|error| format!("{}: {error}", program.display()))?;
    let cargo = std::env::var("CARGO_HOME")
        .or_else(|_| std::env::var("HOME").map(|home| format!("{home}/.cargo")))
        .unwrap_or_else(|_| ".cargo".into());
    let root = root.display().to_string();
    for (what, path) in [("the checkout", root), ("cargo's registry", cargo)] {
        let found = bytes
            .windows(path.len())
            .filter(|part| *part == path.as_bytes());
        println!(
            "paths of {what} in {}: {}",
            program.display(),
            found.count()
        );
    }
    Ok(())
}

/// Writes the archive, and checks that it does not exceed the size limit.
fn pack(folder: &Path, archive: &Path) -> Result<(), String> {
    let parent = folder.parent().unwrap_or(folder);
    let mut tar = Command::new("tar");
    tar.args([
        "--create",
        "--xz",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
    ])
    .arg("--file")
    .arg(archive)
    .arg("--directory")
    .arg(parent)
    .arg(FOLDER)
    .env("XZ_OPT", "-6 -T0");
    run_command(&mut tar)?;
    let length =
        fs::metadata(archive).map_err(|error| format!("{}: {error}", archive.display()))?;
    let mebibytes = length.len() as f64 / (1 << 20) as f64;
    if length.len() > MAX_BYTES {
        return Err(format!(
            "{} has {mebibytes:.1} MiB, and the limit is 50 MiB: leave out --tests",
            archive.display()
        ));
    }
    println!("{}: {mebibytes:.1} MiB", archive.display());
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
#[path = "gpu_kit_tests.rs"]
mod tests;
