//! The command `kernel-check` as it is called.

#![cfg(feature = "wgpu")]

use std::process::Command;

/// What the command says on standard error when it fails.
fn complaint(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kernel-check"));
    let output = command.args(arguments).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn missing_compilers_are_named() {
    let said = complaint(&["--wheels", "no-such-folder", "--keep", "no-such-folder"]);
    assert!(said.contains("no-such-folder/nvidia"), "{said}");
    assert!(said.contains("is missing"), "{said}");
}

#[test]
fn an_unknown_architecture_is_answered_with_those_there_are() {
    let said = complaint(&["--wheels", "w", "--keep", "k", "--arch", "sm_70"]);
    assert!(said.contains("there is sm_80, sm_90a, sm_100a"), "{said}");
}
