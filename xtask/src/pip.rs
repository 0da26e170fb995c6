//! Installs packages of the Python package index.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::apt;
use crate::process::run;

/// Python programs to try. Debian's python3 is used if the first python3 on the path has no pip.
const PYTHONS: [&str; 2] = ["python3", "/usr/bin/python3"];

const ADVICE: &str = "python3 with pip is missing
  Debian, Ubuntu:  sudo apt-get install python3-pip
  Fedora:          sudo dnf install python3-pip
  Arch:            sudo pacman -S python-pip";

/// Installs packages, such as `name==1.2.3`, into a folder. Install all packages in one call: pip replaces their
/// shared folders as a whole.
pub fn install(packages: &[String], folder: &Path) -> Result<(), String> {
    install_with(&["--only-binary", ":all:"], packages, folder)
}

/// Installs a package that has no wheel. Its build may download a program.
pub fn install_from_source(package: String, folder: &Path) -> Result<(), String> {
    install_with(&[], &[package], folder)
}

fn install_with(options: &[&str], packages: &[String], folder: &Path) -> Result<(), String> {
    let mut command = Command::new(find_or_install_pip()?);
    command
        .args(["-m", "pip", "install", "--no-deps", "--upgrade"])
        .args(["--no-input", "--progress-bar", "off"])
        .args(options)
        .arg("--target")
        .arg(folder)
        .args(packages)
        // Nothing outside of the folder is changed.
        .env("PIP_ROOT_USER_ACTION", "ignore")
        .env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    run(&mut command)
}

/// Returns a Python that has pip, and installs pip where possible.
fn find_or_install_pip() -> Result<&'static str, String> {
    if let Some(python) = with_pip() {
        return Ok(python);
    }
    if apt::may_install() {
        apt::install(&["python3-pip"]).map_err(|reason| format!("{ADVICE}\n{reason}"))?;
    }
    with_pip().ok_or_else(|| ADVICE.into())
}

fn with_pip() -> Option<&'static str> {
    PYTHONS.into_iter().find(|python| {
        let mut command = Command::new(python);
        command.args(["-m", "pip", "--version"]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    })
}
