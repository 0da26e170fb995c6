//! Whether there is a BLAS library for the tests of `kernels.gemm`, and how to get one.

use std::path::Path;

use crate::apt;

const PACKAGE: &str = "libopenblas0-pthread";

/// Where Debian, Ubuntu and others have it.
const FOLDERS: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];

/// Finds OpenBLAS, or installs it where possible. The error says how to install it; without any the tests of it check
/// nothing.
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
