//! The CUDA C++ of each kernel.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Map, Value};

use super::runs::hash;
use crate::process::run as run_command;
use crate::temp::TempDir;

/// The architecture, which has every type and every engine.
const ARCH: &str = "sm_90a";

/// The hash of the source of each kernel by its architecture and name.
pub fn hashes(kernel_check: &Path) -> Result<Value, String> {
    let folder = TempDir::new("golden-kernels").map_err(|e| format!("a temporary folder: {e}"))?;
    let mut command = Command::new(kernel_check);
    command
        .args(["--sources-only", "--arch", ARCH, "--keep"])
        .arg(folder.path());
    run_command(&mut command)?;
    let mut hashes = Map::new();
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let entries = fs::read_dir(folder.path()).map_err(|e| failed(folder.path(), e))?;
    for arch in entries.flatten().map(|entry| entry.path()) {
        let files = fs::read_dir(&arch).map_err(|e| failed(&arch, e))?;
        for file in files.flatten().map(|entry| entry.path()) {
            let bytes = fs::read(&file).map_err(|e| failed(&file, e))?;
            let name = file.strip_prefix(folder.path()).unwrap_or(&file);
            hashes.insert(name.display().to_string(), hash(&bytes).into());
        }
    }
    println!("{} kernels", hashes.len());
    // In the order of their names, whatever the order of the files.
    hashes.sort_keys();
    Ok(Value::Object(hashes))
}
