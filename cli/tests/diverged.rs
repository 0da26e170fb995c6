//! Tests that a run whose loss is no longer finite fails with an error for that step, and not while generating its
//! sample.

use std::fs;
use std::process::Command;

/// A recipe with a sample at the end, and a learning rate at which training diverges.
const RECIPE: &str = r#"
[parallel]
data = 2

[sample]
prompt = "fn"
tokens = 4

[model]
family = "gpt2"
context = 16
hidden = 16
layers = 1
heads = 2

[train]
steps = 4
micro_batch_size = 1
global_batch_size = 4
learning_rate = 1e30
min_learning_rate = 0.0
warmup_steps = 1
held_out_samples = 2
"#;

/// Returns the exit code and standard error of a run with these flags.
fn pretrain(flags: &str) -> (Option<i32>, String) {
    let temp = tempfile::tempdir().unwrap();
    let file = |name: &str| temp.path().join(name);
    let text = "fn add(a: u8, b: u8) -> u8 { a + b }\n".repeat(500);
    fs::write(file("text.rs"), text).unwrap();
    fs::write(file("recipe.toml"), RECIPE).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command
        .arg("pretrain")
        .arg("--recipe")
        .arg(file("recipe.toml"));
    command.arg("--data").arg(file("text.rs"));
    command.args(flags.split_whitespace());
    let output = command.arg("--run-dir").arg(file("run")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said)
}

#[test]
fn the_verdict_on_a_step_is_the_exit_code() {
    for (flags, code, error) in [
        (
            "--train.check_replay_every 9",
            9,
            "error: step 2: data or software: no loss is finite from there on; it is the same on another data-parallel rank",
        ),
        (
            "--lr 1e-3 --train.check_replay_every 1 --inject bit-flip:gradient:7:20@rank=1,step=3,call=5",
            5,
            "error: rank",
        ),
        (
            "--lr 1e-3 --train.check_replay_every 2 --inject bit-flip:weight:3:9@rank=0,step=3,call=2",
            6,
            "error: rank",
        ),
        // Found before the checkpoint of the step is saved. Only this check covers the step.
        (
            "--lr 1e-3 --save-every 1 --train.check_replay_every 4 --inject bit-flip:collective:1000:28@rank=1,step=3,call=0",
            6,
            "step 3: weights or the state of the optimizer changed",
        ),
    ] {
        let (found, said) = pretrain(flags);
        assert_eq!(found, Some(code), "{flags}: {said}");
        assert!(said.contains(error), "{flags}: {said}");
    }
}

#[test]
fn a_run_that_diverges_says_at_which_step() {
    let (code, said) = pretrain("");
    assert_eq!(code, Some(1), "{said}");
    let error = said.lines().last().unwrap();
    assert!(
        error.starts_with("error: training diverged at step 2: "),
        "{said}"
    );
    // Two ranks have gradients that are not finite, but only one of them prints the warning.
    for step in 2..=4 {
        let skipped = format!("step {step} skipped on every rank: the loss");
        assert_eq!(said.matches(&skipped).count(), 1, "{said}");
    }
    assert_eq!(said.matches("WARN").count(), 3, "{said}");
}
