//! `cargo xtask peers`: compares with other implementations.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::process::{cargo, copy_folder, run as run_command, target_folder};
use crate::report::{Outcome, Report};
use crate::temp::TempDir;

/// The pinned packages of the environment, and the program that compares files.
const REQUIREMENTS: &str = "tools/peers/requirements.txt";
const COMPARE: &str = "tools/peers/compare.py";

/// The scripts that make fixtures, and the folders of the repository that the scripts write.
const SCRIPTS: &[(&str, &[&str])] = &[
    ("burn-megatron-kernels/tests/fixtures/fp8/make.py", &[]),
    ("burn-megatron-data/tests/fixtures/chat/make.py", &[]),
    ("burn-megatron/tests/fixtures/context/make.py", &[]),
    ("burn-megatron-data/tests/fixtures/data/make.py", &[]),
    ("burn-megatron/tests/fixtures/moe/make.py", &[]),
    ("burn-megatron/tests/fixtures/muon/make.py", &[]),
    ("burn-megatron-data/tests/fixtures/tokenizer/make.py", &[]),
    ("cli/tests/fixtures/documents/make.py", &[]),
    ("cli/tests/fixtures/preprocess/make.py", &[]),
    ("models/tests/fixtures/hf/make.py", &[]),
    ("models/tests/fixtures/hf/mtp.py", &[]),
    (
        "models/tests/fixtures/hf/index.py",
        &["models/src/hf/config"],
    ),
    ("models/tests/fixtures/hf/keys.py", &[]),
    ("models/tests/fixtures/peft/make.py", &[]),
    ("tests/fixtures/oracle/make.py", &[]),
];

/// A script whose output differs between runs, and the reason.
const NOT_REPEATABLE: (&str, &str) = (
    "burn-megatron-data/tests/fixtures/tokenizer/make.py",
    "the trainers of the library tokenizers break ties at random, so each run makes different tokenizers",
);

/// The folders that scripts read or write.
const FOLDERS: [&str; 6] = [
    "burn-megatron-kernels/tests/fixtures",
    "burn-megatron/tests/fixtures",
    "burn-megatron-data/tests/fixtures",
    "cli/tests/fixtures",
    "models",
    "tests/fixtures",
];

#[derive(Args)]
pub struct Options {
    /// Run only scripts whose path contains one of these texts. The comparison of exported folders is `export`.
    filter: Vec<String>,
}

impl Options {
    fn includes(&self, name: &str) -> bool {
        self.filter.is_empty() || self.filter.iter().any(|part| name.contains(part.as_str()))
    }
}

/// Installs the packages, runs each script on a copy of the fixtures, and compares its output with the fixtures.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    let mut python = Err("the environment is missing".to_string());
    report.step("packages", || {
        python = find_or_install(root);
        python.as_ref().map(drop).map_err(String::clone)
    });
    let Ok(python) = python else {
        return;
    };
    for (script, more) in SCRIPTS {
        if options.includes(script) {
            report.step(script, || match NOT_REPEATABLE {
                (other, reason) if other == *script => Outcome::Skipped(reason.into()),
                _ => compare(root, &python, script, more).into(),
            });
        }
    }
    if options.includes("export") {
        report.step("export", || exported(root, &python));
    }
}

/// Skips the comparisons in `ci`, where the tests replay the fixtures.
pub fn skip(report: &mut Report) {
    report.step("peers", || {
        Outcome::Skipped(format!(
            "{} scripts that compare with other implementations need Python packages of several gigabytes: run \
             cargo xtask peers. The tests replay what the scripts wrote",
            SCRIPTS.len()
        ))
    });
}

/// Returns the Python of `PEERS_PYTHON`, or the Python of a virtual environment in the target folder with the pinned
/// packages.
fn find_or_install(root: &Path) -> Result<PathBuf, String> {
    if let Some(python) = env::var_os("PEERS_PYTHON") {
        return Ok(python.into());
    }
    let folder = target_folder(root)?.join("peers");
    let python = folder.join(if cfg!(windows) {
        "Scripts/python.exe"
    } else {
        "bin/python"
    });
    let installed = folder.join("requirements.txt");
    let wanted =
        fs::read_to_string(root.join(REQUIREMENTS)).map_err(|e| format!("{REQUIREMENTS}: {e}"))?;
    if fs::read_to_string(&installed).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    run_command(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--no-input",
        "--progress-bar",
        "off",
        "-r",
    ]);
    run_command(pip.arg(root.join(REQUIREMENTS)))?;
    fs::write(&installed, wanted).map_err(|e| format!("{}: {e}", installed.display()))?;
    Ok(python)
}

/// Runs a script in a copy of the folders, so that a failure leaves the repository unchanged.
fn compare(root: &Path, python: &Path, script: &str, more: &[&str]) -> Result<(), String> {
    let copy = TempDir::new("peers").map_err(|e| e.to_string())?;
    for folder in FOLDERS {
        copy_folder(&root.join(folder), &copy.path().join(folder))?;
    }
    let mut command = Command::new(python);
    command
        .arg(copy.path().join(script))
        .current_dir(copy.path());
    run_command(
        command
            .env("HF_HUB_OFFLINE", "1")
            .env("CUDA_VISIBLE_DEVICES", ""),
    )?;
    let own = Path::new(script).parent().unwrap_or(Path::new(""));
    for folder in more.iter().map(Path::new).chain([own]) {
        let mut command = Command::new(python);
        command.arg(root.join(COMPARE));
        run_command(command.args([root.join(folder), copy.path().join(folder)]))?;
    }
    Ok(())
}

/// Converts each fixture to a checkpoint and back, and compares the logits of `transformers`.
fn exported(root: &Path, python: &Path) -> Result<(), String> {
    let build = [
        "build",
        "--package",
        "burn-megatron-cli",
        "--bin",
        "burn-megatron",
    ];
    run_command(&mut cargo(root, &build))?;
    let program = target_folder(root)?.join("debug/burn-megatron");
    let mut command = Command::new(python);
    run_command(
        command
            .arg(root.join("models/tests/fixtures/hf/check.py"))
            .arg(program),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that every script that makes fixtures is listed. A script that is not listed would not be compared.
    #[test]
    fn every_script_that_makes_fixtures_is_listed() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut found = vec![];
        for folder in FOLDERS {
            find_scripts(&root, Path::new(folder), &mut found);
        }
        found.retain(|script| !script.ends_with("hf/check.py"));
        found.sort();
        let mut listed: Vec<_> = SCRIPTS
            .iter()
            .map(|(script, _)| script.to_string())
            .collect();
        listed.sort();
        assert_eq!(found, listed);
    }

    fn find_scripts(root: &Path, folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let path = folder.join(entry.unwrap().file_name());
            if root.join(&path).is_dir() {
                find_scripts(root, &path, found);
            } else if path.extension().is_some_and(|ending| ending == "py") {
                found.push(path.to_str().unwrap().replace('\\', "/"));
            }
        }
    }
}
