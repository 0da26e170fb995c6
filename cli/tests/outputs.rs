//! Tests `burn-megatron` with an output that is closed or not writable.
#![cfg(unix)]

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

const RECIPE: &str = r#"
[parallel]
data = 1

[model]
family = "gpt2"
layers = 2
hidden = 16
heads = 4
context = 16

[train]
micro_batch_size = 2
global_batch_size = 4
held_out_samples = 4
steps = 3
learning_rate = 1e-3
warmup_steps = 1

[sample]
prompt = "fn"
tokens = 4

[checkpoint]
every = 3
"#;

/// Returns a pipe whose reader is closed, like the output to `| head`.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.args(words);
    command
}

fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("text")).unwrap();
    let text = "fn number() -> usize { 7 }\n".repeat(100);
    fs::write(folder.path().join("text/a.rs"), text).unwrap();
    fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
    folder
}

fn pretrain(at: &Path, run: &str, flags: &[&str]) -> Command {
    let mut command = command(&["pretrain", "--tp", "2", "--compute-threads", "1"]);
    command.arg("--recipe").arg(at.join("recipe.toml"));
    command.arg("--data").arg(at.join("text"));
    command.arg("--run-dir").arg(at.join(run)).args(flags);
    command
}

fn error_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_run_whose_output_nobody_reads_writes_its_files() {
    let held = folder();
    let at = held.path();
    let output = pretrain(at, "out", &[]).stdout(closed()).output().unwrap();
    assert!(output.status.success(), "{}", error_text(&output));
    assert!(
        !error_text(&output).contains("panicked"),
        "{}",
        error_text(&output)
    );
    let mut both = pretrain(at, "both", &[]);
    let status = both.stdout(closed()).stderr(closed()).status().unwrap();
    assert!(status.success(), "{status}");
    for run in ["out", "both"] {
        for file in [
            "config.toml",
            "metrics.jsonl",
            "loss.svg",
            "sample.txt",
            "checkpoints/latest",
        ] {
            assert!(at.join(run).join(file).is_file(), "{run}/{file}");
        }
        let metrics = fs::read_to_string(at.join(run).join("metrics.jsonl")).unwrap();
        assert!(metrics.lines().count() >= 3, "{metrics}");
    }
    // Generation ends long before the last token, because no one reads the text.
    let run = at.join("out");
    let mut generate = command(&[
        "generate",
        "--prompt",
        "fn",
        "--max-tokens",
        "100000000",
        "--tp",
        "2",
    ]);
    generate.args(["--tokenizer", "bytes", "--model"]).arg(run);
    let output = generate.stdout(closed()).output().unwrap();
    let text = error_text(&output);
    assert!(output.status.success(), "{text}");
    assert!(
        !text.contains("panicked") && !text.contains("error"),
        "{text}"
    );
}

/// Checks the error for a file size limit. By default, a write beyond the limit ends a process by SIGXFSZ, without a
/// message.
#[test]
fn a_file_size_limit_is_an_error_that_loses_no_checkpoint() {
    let held = folder();
    let at = held.path();
    let run = |limit: &str, flags: &[&str]| {
        let run = pretrain(at, "run", &[&["--resume", "auto"], flags].concat());
        let mut limited = Command::new("sh");
        let script = format!("ulimit -f {limit} && exec \"$0\" \"$@\"");
        limited.args(["-c", &script]).arg(run.get_program());
        limited.args(run.get_args()).output().unwrap()
    };
    let whole = run("unlimited", &[]);
    assert!(whole.status.success(), "{}", error_text(&whole));
    // Enough for the metrics, but too little for a checkpoint.
    let allow = ["--resume-allow-change", "train.steps,train.warmup_steps"];
    let longer = [&["--steps", "6"], &allow[..]].concat();
    let text = error_text(&run("40", &longer));
    for says in ["error: ", "File too large", "note: ", "ulimit -f"] {
        assert!(text.contains(says), "{text}");
    }
    let checkpoints = at.join("run/checkpoints");
    let latest = fs::read_to_string(checkpoints.join("latest")).unwrap();
    assert_eq!(latest, "step-00000003\n");
    let names = fs::read_dir(checkpoints).unwrap();
    let pending = |name: &str| name.starts_with('.');
    assert!(
        !names
            .map(|name| name.unwrap().file_name())
            .any(|name| pending(&name.to_string_lossy()))
    );
    let whole = run("unlimited", &longer);
    assert!(whole.status.success(), "{}", error_text(&whole));
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_is_lost_to_a_full_disk_is_told() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let held = tempfile::tempdir().unwrap();
    let chart = held.path().join("schedule.svg");
    let output = command(&["schedule", "--svg"])
        .arg(&chart)
        .stdout(full)
        .output()
        .unwrap();
    let text = error_text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(
        text.matches("cannot write to standard output").count(),
        1,
        "{text}"
    );
    assert!(!text.contains("panicked") && chart.is_file(), "{text}");
}

#[test]
fn a_fault_that_has_not_struck_is_an_error_when_the_files_are_written() {
    let held = folder();
    let at = held.path();
    let fault = "nan@rank=1,step=3,call=1000000";
    let output = pretrain(at, "run", &["--inject", fault]).output().unwrap();
    let text = error_text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let wanted = format!("error: {fault} did not fire: the rank made no such call");
    assert!(text.contains(&wanted), "{text}");
    assert!(at.join("run/sample.txt").is_file());
    // A resumed run does not execute the previous steps.
    let fault = "nan@rank=1,step=1,call=0";
    let longer = ["--steps", "5", "--resume-allow-change", "train.steps"];
    let resumed = [&longer[..], &["--resume", "auto", "--inject", fault]].concat();
    let output = pretrain(at, "run", &resumed).output().unwrap();
    let text = error_text(&output);
    assert!(!output.status.success());
    let wanted = format!("invalid fault {fault}: step 1 is not in this run; expected steps 4 to 5");
    assert!(text.contains(&wanted), "{text}");
}
