//! Tests `burn-megatron pretrain` on conversations, from the weights of a Hugging Face folder.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// The example recipe, whose paths are relative to the repository.
const RECIPE: &str = "examples/recipes/finetune.toml";

/// A recipe of a small random byte-level model.
const BASE: &str = r#"
[parallel]
data = 1

[model]
family = "llama"
vocabulary = 256
context = 128
hidden = 16
layers = 2
heads = 2
groups = 1
mlp_width = 32

[train]
steps = 1
micro_batch_size = 1
global_batch_size = 1
warmup_steps = 0
held_out_samples = 1

[sample]
tokens = 0
"#;

struct Stage(TempDir);

impl Stage {
    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().into()
    }

    fn run(&self, recipe: &str, run: &str, flags: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        command.args(["pretrain", "--compute-threads", "1", "--timeout", "60"]);
        command.args(["--recipe", recipe, "--run-dir", &self.path(run)]);
        command.args(flags).output().unwrap()
    }

    fn trains(&self, recipe: &str, run: &str, flags: &[&str]) -> String {
        let output = self.run(recipe, run, flags);
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    }

    fn fails(&self, recipe: &str, flags: &[&str], says: &str) {
        let output = self.run(recipe, "failed", flags);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        assert!(text(&output).contains(says), "{says}: {}", text(&output));
        assert!(!Path::new(&self.path("failed")).exists());
    }

    /// Returns the losses of the steps, or on held-out conversations, depending on `kind`.
    fn losses(&self, run: &str, kind: &str) -> Vec<f64> {
        let metrics = fs::read_to_string(format!("{}/metrics.jsonl", self.path(run))).unwrap();
        let lines = metrics
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let lines = lines.filter(|line| line["kind"] == kind);
        lines.map(|line| line["loss"].as_f64().unwrap()).collect()
    }
}

fn text(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    format!("{out}{error}")
}

#[test]
fn a_hugging_face_folder_is_fine_tuned_on_conversations() {
    let stage = Stage(tempfile::tempdir().unwrap());
    let base = stage.path("base.toml");
    fs::write(&base, BASE).unwrap();
    stage.trains(&base, "base", &["--save-hf", "--data", "LICENSE-APACHE"]);
    let folder = stage.path("base/hugging-face/step-00000001");
    // The model is taken from the folder. The recipe does not describe it.
    let load = ["--load", &folder];
    let flags = "--steps 6 --save-every 4 --save-hf --lr 1e-2";
    let flags: Vec<_> = load.into_iter().chain(flags.split(' ')).collect();
    let said = stage.trains(RECIPE, "two", &flags);
    assert!(
        said.contains("44 conversations to train on, 8 held out"),
        "{said}"
    );
    assert!(said.contains("2 layers, hidden 16"), "{said}");
    let (steps, held_out) = (stage.losses("two", "step"), stage.losses("two", "held_out"));
    assert_eq!(steps.len(), 6);
    assert!(held_out[0] < steps[0] - 0.1, "{steps:?} {held_out:?}");
    // One rank has the same losses as two ranks.
    let flags = [
        &load[..],
        &["--steps", "2", "--dp", "1", "--no-save", "--lr", "1e-2"],
    ]
    .concat();
    stage.trains(RECIPE, "one", &flags);
    for (one, two) in stage.losses("one", "step").iter().zip(&steps) {
        assert!((one - two).abs() < 1e-4, "{one} {two}");
    }
    // A resumed run has the same batches, and does not need the initial weights.
    fs::remove_dir_all(&folder).unwrap();
    let checkpoint = stage.path("two/checkpoints/step-00000004");
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command.args([
        "pretrain",
        "--compute-threads",
        "1",
        "--resume",
        &checkpoint,
    ]);
    let resumed = command
        .args(["--run-dir", &stage.path("resumed")])
        .output()
        .unwrap();
    assert!(resumed.status.success(), "{}", text(&resumed));
    assert_eq!(stage.losses("resumed", "step"), steps[4..]);
    // Load the saved folder. Differences are errors.
    let folder = stage.path("two/hugging-face/step-00000006");
    let recipe = fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../examples/recipes/finetune.toml"
    ));
    let other = stage.path("other.toml");
    let with = |more: &str| {
        let load = format!("\n[checkpoint]\nload = '{folder}'\n");
        fs::write(&other, recipe.as_ref().unwrap().clone() + more + &load).unwrap();
    };
    with("");
    stage.trains(&other, "again", &["--steps", "1", "--no-save"]);
    with("\n[model]\nlayers = 3\n");
    stage.fails(&other, &[], "model.layers is 3, not 2");
    with("\n[model]\nlayer = 3\n");
    stage.fails(&other, &[], "unknown field `layer`");
    with("\n[data]\npacking = true\n");
    stage.fails(&other, &[], "data.packing requires token files");
    let bad = stage.path("bad.jsonl");
    fs::write(
        &bad,
        "{\"prompt\": \"a\", \"answer\": \"b\"}\n{\"prompt\": \"a\"}\n",
    )
    .unwrap();
    with("");
    stage.fails(
        &other,
        &["--data", &bad],
        "bad.jsonl', line 2: expected an object with `prompt`",
    );
}
