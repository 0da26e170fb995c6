//! Finds or installs a BLAS library for the tests of `kernels.gemm`.

use std::path::Path;

use crate::apt;

const PACKAGE: &str = "libopenblas0-pthread";

/// Library folders of Debian, Ubuntu and other distributions.
const FOLDERS: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];

/// Finds OpenBLAS, or installs it where possible. The error describes how to install it. Without OpenBLAS, the tests
/// that use it check nothing.
pub fn find_or_install() -> Result<(), String> {
    let is_there = || {
        let mut folders = FOLDERS.iter().map(Path::new);
        folders.any(|folder| folder.join("libopenblas.so.0").exists())
    };
    if is_there() {
        println!("found OpenBLAS");
        return Ok(());
    }
    let advice = format!("no OpenBLAS. Debian, Ubuntu: sudo apt-get install {PACKAGE}");
    if !apt::may_install() {
        return Err(advice);
    }
    apt::install(&[PACKAGE]).map_err(|reason| format!("{advice}\n{reason}"))?;
    match is_there() {
        true => Ok(()),
        false => Err(advice),
    }
}
