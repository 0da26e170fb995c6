//! Passes the version of Burn to `burn-megatron env`.

use std::path::Path;
use std::{env, fs};

fn main() {
    let folder = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let folder = Path::new(&folder);
    // A package has its own lock file. In the repository, the lock file of the workspace is used.
    let locks = [folder.join("Cargo.lock"), folder.join("../Cargo.lock")];
    let lock = locks.iter().find(|lock| lock.is_file());
    let text = lock.and_then(|lock| fs::read_to_string(lock).ok());
    let version = text
        .as_deref()
        .and_then(|text| locked_version(text, "burn"));
    println!(
        "cargo::rustc-env=BURN_VERSION={}",
        version.unwrap_or("unknown")
    );
    println!("cargo::rerun-if-changed=build.rs");
    if let Some(lock) = lock {
        println!("cargo::rerun-if-changed={}", lock.display());
    }
}

fn locked_version<'a>(lock: &'a str, package: &str) -> Option<&'a str> {
    let mut lines = lock.lines();
    let name = format!("name = \"{package}\"");
    lines.find(|line| *line == name)?;
    lines
        .next()?
        .strip_prefix("version = \"")?
        .strip_suffix('"')
}
