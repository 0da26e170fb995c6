//! Tests of the command `kernel-check`, called as a program.

#![cfg(feature = "wgpu")]

use std::process::Command;

/// Returns the standard error of the command, which must fail.
fn stderr_of(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kernel-check"));
    let output = command.args(arguments).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn missing_compilers_are_named() {
    let stderr = stderr_of(&["--wheels", "no-such-folder", "--keep", "no-such-folder"]);
    assert!(stderr.contains("no-such-folder/nvidia"), "{stderr}");
    assert!(stderr.contains("is missing"), "{stderr}");
}

#[test]
fn the_error_for_an_unknown_architecture_lists_the_known_ones() {
    let stderr = stderr_of(&["--wheels", "w", "--keep", "k", "--arch", "sm_70"]);
    assert!(
        stderr.contains("expected one of sm_80, sm_90a, sm_100a"),
        "{stderr}"
    );
}
