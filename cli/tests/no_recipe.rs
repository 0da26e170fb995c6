//! Tests `burn-megatron pretrain` without a recipe: sizes from `--set`, a model from its folder, and a run from its
//! checkpoint.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

const TOKENIZER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../burn-megatron-data/tests/fixtures/tokenizer/byte_bpe"
);

/// The vocabulary size of the tokenizer.
const VOCABULARY: &str = "vocabulary = 400";

/// Flags of a small model on one rank.
const SMALL: &str = "--tp 1 --pp 1 --dp 1 --set model.hidden=16 --set model.context=32 --set model.layers=1 \
                     --set sample.tokens=4 --set train.held_out_samples=2";

struct Stage(TempDir);

impl Stage {
    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().into()
    }

    /// Runs a command line, in which `@name` is a path in the folder.
    fn run(&self, flags: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        command.args(["pretrain", "--compute-threads", "1"]);
        for word in flags.split_whitespace() {
            match word.strip_prefix('@') {
                Some(name) => command.arg(self.path(name)),
                None => command.arg(word),
            };
        }
        command.output().unwrap()
    }

    fn succeeds(&self, flags: &str) -> String {
        let output = self.run(flags);
        assert!(output.status.success(), "{flags}: {}", text(&output));
        text(&output)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }
}

fn text(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    format!("{out}{error}")
}

#[test]
fn a_folder_brings_its_settings() {
    let stage = Stage(tempfile::tempdir().unwrap());
    let line = "the quick brown fox jumps over the lazy dog\n";
    fs::write(stage.path("my.txt"), line.repeat(400)).unwrap();
    let save = "--run-dir @base --save-hf --steps 2";
    stage.succeeds(&format!(
        "{SMALL} --data @my.txt --tokenizer {TOKENIZER} {save}"
    ));
    assert!(stage.read("base/config.toml").contains(VOCABULARY));
    // Hugging Face models contain their tokenizer.
    let folder = stage.path("base/hugging-face/step-00000002");
    let tokenizer = Path::new(TOKENIZER).join("tokenizer.json");
    fs::copy(tokenizer, Path::new(&folder).join("tokenizer.json")).unwrap();

    let tuned = format!("--load {folder} --data @my.txt --steps 2 --set train.held_out_samples=2");
    let said = stage.succeeds(&format!("{tuned} --run-dir @never --dry-run"));
    for says in [
        "1 layer, hidden 16",
        "\nmemory  ",
        "\ntotal ",
        "dry run: the run can start",
    ] {
        assert!(said.contains(says), "{says}: {said}");
    }
    let unfit = stage.run(&format!(
        "{tuned} --run-dir @never --dry-run --memory-limit 1KiB"
    ));
    let [out, error] = [&unfit.stdout, &unfit.stderr].map(|of| String::from_utf8_lossy(of));
    assert_eq!(unfit.status.code(), Some(1), "{out}{error}");
    assert!(out.contains("\ntotal "), "{out}");
    assert!(
        error.starts_with("error: a rank of pipeline rank 0 needs "),
        "{error}"
    );
    assert!(!Path::new(&stage.path("never")).exists());

    let said = stage.succeeds(&format!("{tuned} --run-dir @tuned"));
    let config = stage.read("tuned/config.toml");
    for says in [
        VOCABULARY,
        "hidden = 16",
        "sequence_length = 32",
        "learning_rate = 0.00002",
    ] {
        assert!(config.contains(says), "{says}: {config}");
    }
    // The prompt is the beginning of the held-out text.
    let (_, prompt) = said.split_once("sample after \"").unwrap();
    let prompt = prompt.split('"').next().unwrap();
    assert!(
        prompt.len() > 4 && line.repeat(2).contains(&prompt.replace("\\n", "\n")),
        "{prompt}"
    );

    // A checkpoint that was moved out of its run folder contains the recipe.
    let checkpoint = stage.path("moved/step-00000002");
    fs::create_dir(stage.path("moved")).unwrap();
    fs::rename(stage.path("base/checkpoints/step-00000002"), &checkpoint).unwrap();
    let longer = "--steps 3 --resume-allow-change train.steps --run-dir @longer";
    let said = stage.succeeds(&format!("--resume {checkpoint} {longer}"));
    assert!(said.contains("resumed  after step 2, "), "{said}");
    assert!(stage.read("longer/config.toml").contains(VOCABULARY));
    fs::write(stage.path("my.txt"), line.repeat(500)).unwrap();
    let changed = stage.run(&format!("--resume {checkpoint} --run-dir @changed"));
    assert!(
        text(&changed).contains("the data has changed since "),
        "{}",
        text(&changed)
    );
}
