//! A run whose loss is no longer finite fails with that error, and not while generating its sample.

use std::fs;
use std::process::Command;

/// A recipe with a sample at the end and a learning rate at which training diverges.
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

#[test]
fn a_run_that_diverges_says_at_which_step() {
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
    let output = command.arg("--run-dir").arg(file("run")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let error = said.lines().last().unwrap();
    assert!(
        error.starts_with("error: training diverged at step 2: "),
        "{said}"
    );
    // Two ranks have gradients that are not finite; one of them says so.
    for step in 2..=4 {
        let skipped = format!("step {step} skipped on every rank: the loss");
        assert_eq!(said.matches(&skipped).count(), 1, "{said}");
    }
    assert_eq!(said.matches("WARN").count(), 3, "{said}");
}
