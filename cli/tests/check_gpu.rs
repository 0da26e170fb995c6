//! Tests `check-gpu` on the CPU, where all checks must pass.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn check_gpu(flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.arg("check-gpu").args(flags).output().unwrap()
}

#[test]
fn checks_pass_on_a_cpu_and_are_written_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("checks.json");
    let flags = ["--device", "cpu", "--only", "first-kernel,products,nccl"];
    let json = ["--json", file.to_str().unwrap()];
    let output = check_gpu(&[&flags[..], &json].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.ends_with("all checks pass\n"), "{text}");
    let report: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(report["ok"], true);
    let verdicts = report["checks"].as_array().unwrap().iter();
    let verdicts: Vec<_> = verdicts.map(|check| &check["verdict"]).collect();
    assert_eq!(verdicts, ["pass", "pass", "not run"]);
}

#[test]
fn a_check_without_an_answer_is_killed_and_fails() {
    let flags = ["--device", "cpu", "--only", "training", "--timeout", "0.05"];
    let output = check_gpu(&flags);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("no result after 0.05 s"), "{text}");
    assert!(text.ends_with("FAIL: training\n"), "{text}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_program_without_cuda_says_so_and_runs_nothing() {
    let output = check_gpu(&["--only", "first-kernel,kernels"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("built without cuda"), "{text}");
    assert!(text.contains("not run"), "{text}");
}
