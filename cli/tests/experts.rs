//! Tests a run whose ranks share experts, from its first step to the sample at its end.

use std::fs;
use std::process::Command;

const RECIPE: &str = r#"
[parallel]
data = 2
expert = 2

[sample]
prompt = "fn"
tokens = 4

[model]
family = "mixtral"
context = 16
hidden = 16
layers = 1
heads = 2
groups = 2

[model.moe]
experts = 4
expert_width = 8
losses = [{ kind = "balance", coefficient = 0.01 }]

[train]
steps = 2
micro_batch_size = 1
global_batch_size = 4
warmup_steps = 1
held_out_samples = 2
"#;

/// Checks that all ranks that share the experts take part in generating the sample. With only one of these ranks, the
/// run would wait until the deadline and fail.
#[test]
fn ranks_that_share_experts_write_a_sample() {
    let temp = tempfile::tempdir().unwrap();
    let file = |name: &str| temp.path().join(name);
    let text = "fn add(a: u8, b: u8) -> u8 { a + b }\n".repeat(500);
    fs::write(file("text.rs"), text).unwrap();
    fs::write(file("recipe.toml"), RECIPE).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.args(["pretrain", "--timeout", "20", "--recipe"]);
    command.arg(file("recipe.toml")).arg("--data");
    let command = command.arg(file("text.rs")).arg("--run-dir");
    let output = command.arg(file("run")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("sample after \"fn\""), "{printed}");
}
