//! Tests of the scripts of the kit, with a stand-in for the programs.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::temp::TempDir;

/// Responds as burn-megatron and burn-megatron-bench do. $OK and $VERDICT are the result of check-gpu. The step
/// `step-124m` hangs.
const STAND_IN: &str = r#"#!/usr/bin/env bash
args=("$@")
for i in "${!args[@]}"; do [ "${args[i]}" = --json ] && json=${args[i+1]}; done
case "$0 $*" in
  *check-gpu*)
    echo "{\"ok\": $OK, \"checks\": [{\"name\": \"kernel\", \"verdict\": \"$VERDICT\", \"reason\": \"wrong: 1\", \"seconds\": 0.1}]}" > "$json"
    [ "$OK" = true ];;
  *64,4,32,96*) echo "$$" > "$GPU_KIT_WORK/hanging"; exec sleep 600;;
  *"burn-megatron-bench --log-level warn step"*)
    echo '{"device": "a", "precision": "bf16", "peak_tflops": 989.0, "warm_up": 1, "rows": [{"name": "124m", "attention": "mma",
      "micro_batch_size": 16, "micro_batches": 1, "sequence_length": 1024, "seconds": [0.5], "flops_per_token": 1e9,
      "peak_bytes": 1073741824}]}' > "$json";;
  *conformance*) echo "no NCCL" >&2; exit 3;;
esac
"#;

/// Returns a folder with the kit, and a stand-in for its programs.
fn kit(purpose: &str) -> (TempDir, PathBuf) {
    let folder = TempDir::new(purpose).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let kit = folder.path().join("kit");
    copy_folder(&root.join("tools").join(FOLDER), &kit).unwrap();
    for program in PROGRAMS.map(|name| kit.join(name)) {
        fs::write(&program, STAND_IN).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    (folder, kit)
}

fn command(folder: &TempDir, kit: &Path, ok: bool) -> Command {
    let mut command = Command::new("bash");
    command
        .arg(kit.join("gpu-kit.sh"))
        .current_dir(folder.path())
        .env("OUT", folder.path().join("out"))
        .env("GPU_KIT_WORK", folder.path().join("work"))
        .env("GPU_KIT_LIMITS", "step-124m=1")
        .env("OK", ok.to_string())
        .env("VERDICT", if ok { "pass" } else { "fail" })
        .env_remove("BURN_MEGATRON_UNCHECKED_DEVICE")
        .env_remove("GPU_KIT_PROGRAM");
    command
}

fn report(folder: &TempDir) -> String {
    fs::read_to_string(folder.path().join("out/report.md")).unwrap()
}

/// Returns the names in the archive.
fn archive(folder: &TempDir) -> String {
    let file = folder.path().join("out/gpu-kit-results.tar.gz");
    let list = Command::new("tar").arg("-tzf").arg(file).output().unwrap();
    assert!(list.status.success());
    String::from_utf8(list.stdout).unwrap()
}

#[test]
fn a_wrong_device_keeps_the_steps_that_compute_from_running() {
    let (folder, kit) = kit("gpu-kit-wrong");
    let output = command(&folder, &kit, false).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report = report(&folder);
    for expected in [
        "| 1 | machine | passed |",
        "| 1 | check-gpu | failed: kernel: wrong: 1; the steps that compute do not run |",
        "| 1 | step-124m-16 | not run: device gives wrong results |",
        "| 3 | nccl | not run: device gives wrong results |",
        "| kernel | fail | 0.1 | wrong: 1 |",
    ] {
        assert!(report.contains(expected), "{report}");
    }
    assert!(!report.contains("## Training steps"), "{report}");
    assert!(archive(&folder).contains("gpu-kit-results/check-gpu.json"));
}

#[test]
fn a_step_that_hangs_is_killed_and_the_steps_after_it_run() {
    let (folder, kit) = kit("gpu-kit-limits");
    let mut command = command(&folder, &kit, false);
    command.env("BURN_MEGATRON_UNCHECKED_DEVICE", "1");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report = report(&folder);
    for expected in [
        "| 1 | step-124m | failed: killed at its limit of 1 s |",
        "| 1 | fp8-delayed | passed |",
        "| 3 | nccl | failed: exit code 3: no NCCL |",
        "## Training steps — unchecked",
        "| step-124m-16 | 124m | 1 x 16 x 1024 | mma | 500.0 | 500.0 - 500.0 | 32768 | 32.8 | 3.3 | 1.00 |",
        "## Failed: step-124m\n",
    ] {
        assert!(report.contains(expected), "{report}");
    }
    let pid = fs::read_to_string(folder.path().join("work/hanging")).unwrap();
    assert!(!Path::new("/proc").join(pid.trim()).exists());
    // A later call keeps the results of earlier calls.
    command.arg("3").output().unwrap();
    assert!(self::report(&folder).contains("| 1 | fp8-delayed | passed |"));
}

#[test]
fn a_kit_that_is_killed_leaves_its_results_and_no_process() {
    let (folder, kit) = kit("gpu-kit-killed");
    let mut command = command(&folder, &kit, true);
    command.arg("1").env_remove("GPU_KIT_LIMITS");
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    assert!(lines.any(|line| line.starts_with("== step-124m (")));
    let hanging = folder.path().join("work/hanging");
    let pid = wait_for(|| {
        fs::read_to_string(&hanging)
            .ok()
            .filter(|pid| pid.ends_with('\n'))
    });
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for(|| (!Path::new("/proc").join(pid.trim()).exists()).then_some(()));
    let report = report(&folder);
    assert!(report.contains("| 1 | step-124m-16 | passed |"), "{report}");
    assert!(report.contains("| 1 | step-124m | running |"), "{report}");
    assert!(report.contains("## Training steps\n"), "{report}");
    assert!(archive(&folder).contains("gpu-kit-results/step-124m-16.json"));
}

fn wait_for<T>(mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(start.elapsed() < Duration::from_secs(30));
        thread::sleep(Duration::from_millis(20));
    }
}
