//! Tests `burn-megatron checkpoint upcycle`, and the use of its checkpoint in other commands.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;
use toml::Table;

const RECIPE: &str = r#"
[parallel]
data = 2

[sample]
tokens = 0

[model]
family = "llama"
context = 16
hidden = 16
layers = 2
heads = 2
groups = 1
mlp_width = 24

[train]
steps = 3
learning_rate = 1e-2
micro_batch_size = 2
global_batch_size = 8
warmup_steps = 1
held_out_samples = 2
"#;

/// Folder with a trained dense model in `dense`.
struct Stage(TempDir);

impl Stage {
    fn new() -> Self {
        Self::of(&RECIPE.parse().unwrap())
    }

    fn of(recipe: &Table) -> Self {
        let stage = Self(tempfile::tempdir().unwrap());
        let text = "fn add(a: u8, b: u8) -> u8 { a + b }\n".repeat(500);
        fs::write(stage.path("text.rs"), text).unwrap();
        stage.pretrain("dense", recipe, &[]);
        stage
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a command line, in which `@name` is a path in the folder.
    fn run(&self, command: &str) -> Output {
        let words = command.split(' ').map(|word| match word.strip_prefix('@') {
            Some(name) => self.path(name).into_os_string(),
            None => word.into(),
        });
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        command.args(words).output().unwrap()
    }

    #[track_caller]
    fn succeed(&self, command: &str) -> String {
        let output = self.run(command);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn fail(&self, command: &str) -> String {
        let output = self.run(command);
        assert_eq!(output.status.code(), Some(1), "{command}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Trains in a new run folder, and returns the losses of its steps.
    #[track_caller]
    fn pretrain(&self, run: &str, recipe: &Table, flags: &[&str]) -> Vec<f64> {
        let file = self.path(&format!("{run}.toml"));
        fs::write(file, toml::to_string(recipe).unwrap()).unwrap();
        let flags = flags.join(" ");
        let command = format!(
            "pretrain --recipe @{run}.toml --data @text.rs --run-dir @{run} --timeout 60 {flags}"
        );
        self.succeed(command.trim_end());
        let metrics = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        let lines = metrics.lines();
        let lines = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
        let steps = lines.filter(|line| line["kind"] == "step");
        steps.map(|line| line["loss"].as_f64().unwrap()).collect()
    }
}

/// Returns the recipe with the settings that the command printed.
fn with_printed(recipe: &Table, printed: &str) -> Table {
    let (_, printed) = printed.split_once("\n\n").unwrap();
    let printed: Table = printed.parse().unwrap();
    let mut recipe = recipe.clone();
    let model = recipe["model"].as_table_mut().unwrap();
    model.extend(printed["model"].as_table().unwrap().clone());
    recipe
}

#[test]
fn a_dense_run_goes_on_with_experts() {
    let stage = Stage::new();
    let mut recipe: Table = RECIPE.parse().unwrap();
    recipe["train"]["steps"] = 1.into();
    let dense = stage.pretrain("dense-again", &recipe, &["--load", "@dense"]);
    let printed = stage
        .succeed("checkpoint upcycle @dense @up --experts 4 --granularity 2 --experts-per-token 2");
    for said in [
        "4 experts of width 12 in 2 of 2 blocks, 2 per token",
        "the outputs of the new model equal the outputs of",
        "[model]\nfamily = \"mixtral\"\nmlp_width = 12\n",
    ] {
        assert!(printed.contains(said), "{said}\n{printed}");
    }
    let recipe = with_printed(&recipe, &printed);
    for (run, flags) in [
        ("one", &["--load", "@up", "--dp", "1"][..]),
        ("shared", &["--load", "@up", "--ep", "2"]),
    ] {
        let found = stage.pretrain(run, &recipe, flags);
        let apart = (found[0] - dense[0]).abs();
        assert!(apart < 1e-5, "{run}: {} and {}", found[0], dense[0]);
    }
    stage.succeed("checkpoint verify @up");
    let generate = |model: &str| {
        let flags = "--prompt fn --max-tokens 6 --temperature 0";
        stage.succeed(&format!("generate --model @{model} {flags}"))
    };
    assert_eq!(generate("up"), generate("dense"));
    assert_eq!(generate("up --tp 2 --sp"), generate("dense"));
    stage.succeed("convert @up @hf");
    let config = fs::read_to_string(stage.path("hf").join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["architectures"][0], "MixtralForCausalLM");
    assert_eq!(config["num_local_experts"], 4);
    assert_eq!(generate("hf --tokenizer bytes"), generate("dense"));

    let error =
        stage.fail("pretrain --recipe @one.toml --data @text.rs --resume @up --runs-dir @x");
    assert!(error.contains("has weights only"), "{error}");
}

/// Both of two stages hold the embedding.
#[test]
fn a_model_with_tied_embeddings() {
    let mut recipe: Table = RECIPE.parse().unwrap();
    recipe["model"]
        .as_table_mut()
        .unwrap()
        .insert("tied".into(), true.into());
    let stage = Stage::of(&recipe);
    recipe["train"]["steps"] = 1.into();
    let dense = stage.pretrain("dense-again", &recipe, &["--load", "@dense"]);
    let printed = stage.succeed("checkpoint upcycle @dense @up --experts 4 -k 2");
    let recipe = with_printed(&recipe, &printed);
    for (run, flags) in [
        ("shared", &["--load", "@up", "--ep", "2"][..]),
        ("stages", &["--load", "@up", "--pp", "2"]),
    ] {
        let found = stage.pretrain(run, &recipe, flags);
        let apart = (found[0] - dense[0]).abs();
        assert!(apart < 1e-5, "{run}: {} and {}", found[0], dense[0]);
    }
}

#[test]
fn it_says_how_outputs_differ_and_refuses_what_does_not_fit() {
    let stage = Stage::new();
    let upcycle = "checkpoint upcycle @dense @up";
    for (flags, said) in [
        (
            "--experts 4 --granularity 5 -k 2",
            "an MLP of width 24 cannot be cut into granularity = 5 slices: expected 1, 2, 3, 4, 6, 8, 12",
        ),
        (
            "--experts 5 --granularity 2 -k 2",
            "5 experts are not a multiple of granularity = 2: expected 4 or 6",
        ),
        (
            "--experts 4 --granularity 2 -k 6",
            "experts_per_token = 6: expected 1 to the 4 experts",
        ),
    ] {
        let error = stage.fail(&format!("{upcycle} {flags}"));
        assert!(error.contains(said), "{error}");
        assert!(!stage.path("up").exists());
    }
    let printed = stage.succeed(&format!(
        "{upcycle} --experts 4 --granularity 2 -k 3 --score pre-softmax --first-dense 1"
    ));
    for said in [
        "in 1 of 2 blocks",
        "the outputs of the new model differ from the outputs of",
        "slices of an MLP are weighted by 0.67 and 1.33",
        "outputs are multiplied by 1.33 times the sum of the chosen scores",
        "convert cannot export this model: no supported Hugging Face family computes this model: mixtral requires",
        "score = \"pre-softmax\"",
    ] {
        assert!(printed.contains(said), "{said}\n{printed}");
    }
    let recipe = with_printed(&RECIPE.parse().unwrap(), &printed);
    stage.pretrain("on", &recipe, &["--load", "@up"]);

    let again = stage.fail(&format!("{upcycle} --experts 4 -k 2"));
    assert!(
        again.contains("already exists: give a new folder"),
        "{again}"
    );
    let twice = stage.fail("checkpoint upcycle @up @up2 --experts 4 -k 2");
    assert!(twice.contains("it has 4 experts already"), "{twice}");
    assert!(!stage.path("up2").exists());
}
