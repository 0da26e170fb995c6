//! Hashes of the CUDA C++ source of each kernel.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Map, Value};

use super::runs::hash;
use crate::process::run as run_command;
use crate::temp::TempDir;

/// The architecture. It has every type and every matrix instruction.
const ARCH: &str = "sm_90a";

/// Returns the hash of the source of each kernel, by architecture and name.
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
            let text = fs::read_to_string(&file).map_err(|e| failed(&file, e))?;
            let name = file.strip_prefix(folder.path()).unwrap_or(&file);
            hashes.insert(
                name.display().to_string(),
                hash(lines(&text).as_bytes()).into(),
            );
        }
    }
    println!("{} kernels", hashes.len());
    // Sorted by name, independent of the order of the files.
    hashes.sort_keys();
    Ok(Value::Object(hashes))
}

/// Returns the lines in a fixed order, without parts that differ between two builds of the same code. CubeCL numbers
/// variables differently each time. The name of a kernel ends with a hash of its id, which differs between builds.
fn lines(source: &str) -> String {
    let mut lines: Vec<_> = source
        .lines()
        .map(|line| without_numbers(&without_hash(line)))
        .collect();
    lines.sort_unstable();
    lines.join("\n")
}

/// Replaces `name_0123abcd(` with `name(`.
fn without_hash(line: &str) -> String {
    let is_hash = |end: &str| end.len() == 8 && end.bytes().all(|digit| digit.is_ascii_hexdigit());
    let without = |part| match str::rsplit_once(part, '_') {
        Some((name, end)) if is_hash(end) => name,
        _ => part,
    };
    let parts: Vec<_> = line.split('(').map(without).collect();
    parts.join("(")
}

/// Replaces `v123` with `v`.
fn without_numbers(line: &str) -> String {
    let mut kept = String::new();
    let (mut before, mut is_number) = (' ', false);
    for c in line.chars() {
        let begins = kept.ends_with('v') && !(before.is_alphanumeric() || before == '_');
        is_number = c.is_ascii_digit() && (is_number || begins);
        if !is_number {
            before = kept.chars().next_back().unwrap_or(' ');
            kept.push(c);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_the_order_of_variables_do_not_count() {
        let first = "float * const v12 = &v3[7];\nfloat v4 = v12[0];\n";
        let second = "float v9 = v1[0];\nfloat * const v1 = &v22[7];\n";
        assert_eq!(lines(first), lines(second));
        assert_ne!(lines(first), lines(&first.replace("[7]", "[8]")));
        assert_eq!(
            lines("void sum_f_n_8_d0a2c48d(int v1)"),
            "void sum_f_n_8(int v)"
        );
        assert_eq!(without_numbers("env12(v1, _v2, v3v)"), "env12(v, _v2, vv)");
    }
}
