//! Tests `burn-megatron pretrain` with the weights of a Hugging Face folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use burn::tensor::{DType, TensorData};
use burn_megatron::checkpoint::{Checkpoint, ElementType, TensorSlice, TensorSource};
use burn_megatron_data::indexed::{IndexedDatasetBuilder, TokenType};
use burn_megatron_models::TransformerConfig;
use burn_megatron_models::hf::HfFolder;
use burn_megatron_models::hf::peft::PeftAdapter;
use serde_json::Value;

const FIXTURE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../models/tests/fixtures/hf/llama2"
);

/// The vocabulary size of the fixture.
const VOCABULARY: u32 = 61;

/// Temporary folder with token files, which is removed on drop.
struct Stage(PathBuf);

impl Stage {
    fn new(name: &str) -> Self {
        let name = format!("hugging-face-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let mut writer =
            IndexedDatasetBuilder::create(&folder.join("tokens"), TokenType::U16).unwrap();
        for document in 0..40 {
            let token = |place: u32| (place * place + 7 * document) % VOCABULARY;
            let tokens: Vec<_> = (0..50).map(token).collect();
            writer.document(&tokens).unwrap();
        }
        writer.finish().unwrap();
        Self(folder)
    }

    /// Writes a recipe with a changed model of the fixture.
    fn recipe(&self, name: &str, change: fn(&mut TransformerConfig), sample: usize) {
        let mut model = HfFolder::open(FIXTURE).unwrap().config().model.clone();
        change(&mut model);
        let table = BTreeMap::from([("model", &model)]);
        let model = toml::to_string(&table);
        let rest = format!(
            "
[parallel]
data = 1

[train]
micro_batch_size = 2
global_batch_size = 4
sequence_length = 16
held_out_samples = 4
steps = 2
learning_rate = 1e-3
warmup_steps = 0

[sample]
prompt = \"fn\"
tokens = {sample}

[data]
files = ['{}']
split = '80,20'
",
            self.0.join("tokens").display()
        );
        let path = self.0.join(format!("{name}.toml"));
        fs::write(path, model.unwrap() + &rest).unwrap();
    }

    fn run(&self, recipe: &str, run: &str, flags: &[&str]) -> Output {
        let path = |name: &str| self.0.join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        command.arg("pretrain").arg("--recipe");
        command.arg(path(&format!("{recipe}.toml")));
        command.arg("--run-dir").arg(path(run));
        command.args(["--compute-threads", "1", "--timeout", "60"]);
        command.args(flags).output().unwrap()
    }

    /// Returns the losses of the steps.
    fn losses(&self, run: &str, flags: &[&str]) -> Vec<f64> {
        let output = self.run("same", run, flags);
        assert!(output.status.success(), "{}", text(&output));
        let metrics = fs::read_to_string(self.0.join(run).join("metrics.jsonl")).unwrap();
        let lines = metrics.lines();
        let lines = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
        let steps = lines.filter(|line| line["kind"] == "step");
        steps.map(|line| line["loss"].as_f64().unwrap()).collect()
    }

    fn fails(&self, recipe: &str, flags: &[&str], says: &str) {
        let output = self.run(recipe, "failed", flags);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        assert!(text(&output).contains(says), "{says}: {}", text(&output));
        // The error is reported before anything is written.
        assert!(!self.0.join("failed").exists());
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    format!("{out}{error}")
}

#[test]
fn every_layout_begins_with_the_same_weights() {
    let stage = Stage::new("layouts");
    stage.recipe("same", |_| {}, 0);
    let checkpoint = stage.0.join("checkpoint");
    let mut convert = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    convert.args(["convert", FIXTURE]);
    let converted = convert.arg(&checkpoint).output().unwrap();
    assert!(converted.status.success(), "{}", text(&converted));
    let random = stage.losses("random", &[]);
    let own = stage.losses("own", &["--load", FIXTURE]);
    assert_eq!(own.len(), 2);
    assert!((own[0] - random[0]).abs() > 0.1, "{own:?} {random:?}");
    let checkpoint = checkpoint.to_str().unwrap();
    assert_eq!(stage.losses("converted", &["--load", checkpoint]), own);
    for (run, flags) in [
        ("tensor", ["--tp", "2"]),
        ("data", ["--dp", "2"]),
        ("pipeline", ["--pp", "2"]),
    ] {
        let other = stage.losses(run, &[&flags[..], &["--load", FIXTURE]].concat());
        for (a, b) in own.iter().zip(&other) {
            assert!((a - b).abs() < 1e-4, "{run}: {own:?} {other:?}");
        }
    }
}

/// Checks that adapters are saved, also in the format of `peft`, resumed from the model that the run started from,
/// and merged into this model.
#[test]
fn adapters_of_a_folder_are_trained_resumed_and_merged() {
    let stage = Stage::new("lora");
    stage.recipe("same", |_| {}, 0);
    let path = stage.0.join("same.toml");
    let recipe = fs::read_to_string(&path).unwrap();
    let lora = "\n[lora]\nrank = 2\ntarget_modules = [\"q_proj\", \"o_proj\"]\n";
    fs::write(&path, recipe + lora).unwrap();
    let flags = [
        "--tp",
        "2",
        "--save-every",
        "1",
        "--save-hf",
        "--load",
        FIXTURE,
    ];
    let losses = stage.losses("run", &flags);
    let run = stage.0.join("run");
    let config = HfFolder::open(FIXTURE).unwrap().config().clone();
    let of = (config.family, &config.model);
    let adapter = PeftAdapter::open(&run.join("hugging-face/step-00000002"), of).unwrap();
    let base = fs::canonicalize(FIXTURE).unwrap();
    assert_eq!(adapter.lora().base_model, Some(base.clone()));
    let checkpoint = Checkpoint::open(run.join("checkpoints")).unwrap();
    // Two factors each for two layers in two blocks.
    assert_eq!(adapter.keys().len(), 8);
    let weights = checkpoint.keys().into_iter();
    assert_eq!(weights.filter(|key| key.starts_with("model/")).count(), 8);
    let whole = |source: &dyn TensorSource, key: &str| {
        let slice = TensorSlice::whole(&source.tensor(key).unwrap().shape);
        source.read(key, &slice).unwrap()
    };
    for key in adapter.keys() {
        let bytes = whole(&adapter, &key);
        assert_eq!(bytes, whole(&checkpoint, &key), "{key}");
        assert!(bytes.iter().any(|byte| *byte != 0), "{key}");
    }
    // Resume from the first step, with the frozen weights of the folder.
    let first = run.join("checkpoints/step-00000001");
    let flags = [
        "--dp",
        "2",
        "--zero-stage",
        "3",
        "--resume",
        first.to_str().unwrap(),
    ];
    let fresh = stage.0.join("same.toml");
    let recipe = fs::read_to_string(&fresh).unwrap();
    let named = format!("[lora]\nbase_model = '{}'", base.display());
    fs::write(&fresh, recipe.replace("[lora]", &named)).unwrap();
    let resumed = stage.losses("resumed", &flags);
    let last = resumed.last().unwrap();
    assert!((last - losses[1]).abs() < 1e-5, "{losses:?} {resumed:?}");
    let merged = stage.0.join("merged");
    let mut convert = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    convert.args(["convert", "--merge-lora"]);
    let converted = convert.arg(&run).arg(&merged).output().unwrap();
    assert!(converted.status.success(), "{}", text(&converted));
    let (base, merged) = (
        HfFolder::open(base).unwrap(),
        HfFolder::open(merged).unwrap(),
    );
    assert_eq!(base.keys(), merged.keys());
    let changed = base.keys().into_iter();
    let changed: Vec<_> = changed
        .filter(|key| whole(&base, key) != whole(&merged, key))
        .collect();
    let weight =
        |block: usize, layer: &str| format!("model/blocks.{block}.attention.{layer}.weight");
    let wanted = [0, 1].map(|block| [weight(block, "output"), weight(block, "qkv")]);
    assert_eq!(changed, wanted.concat());
    // The key projections are unchanged.
    let keys = TensorSlice {
        offset: vec![0, 32],
        shape: vec![32, 32],
    };
    let of_qkv = |source: &HfFolder| source.read(&weight(1, "qkv"), &keys).unwrap();
    assert_eq!(of_qkv(&base), of_qkv(&merged));
    stage.fails(
        "same",
        &[
            "--save-hf",
            "--fp8",
            "delayed",
            "--data_parallel.fp8_param_gather",
            "--dp",
            "2",
            "--zero-stage",
            "1",
        ],
        "fp8_param_gather",
    );
}

/// Checks that a run that ended before its first checkpoint starts again from the adapters that it loaded.
#[test]
fn adapters_are_loaded_again_where_there_is_no_checkpoint() {
    let stage = Stage::new("adapters");
    stage.recipe("same", |_| {}, 0);
    let path = stage.0.join("same.toml");
    let recipe = fs::read_to_string(&path).unwrap();
    fs::write(&path, recipe + "\n[lora]\nrank = 2\n").unwrap();
    stage.losses("trained", &["--load", FIXTURE, "--lr", "0.1"]);
    let trained = stage.0.join("trained");
    let flags = ["--dp", "2", "--load", trained.to_str().unwrap()];
    let whole = stage.losses("whole", &flags);
    let fails = ["--inject", "error@rank=0,step=2,call=1"];
    let ended = stage.run("same", "ended", &[&flags[..], &fails].concat());
    assert!(!ended.status.success(), "{}", text(&ended));
    let resumed = stage.losses("ended", &["--resume", "auto"]);
    // The step of the first attempt is kept in the metrics.
    assert_eq!(resumed[..], [&whole[..1], &whole[..]].concat());
    let other = ["--load", FIXTURE, "--lora.base_model", flags[3]];
    stage.fails("same", &other, "conflicts with --load");
    let base = stage.losses("base", &["--dp", "2", "--load", FIXTURE]);
    assert!((base[0] - whole[0]).abs() > 1e-3, "{base:?} {whole:?}");
}

/// Checks that a folder is written for each checkpoint, in any layout, and that no folder exists without a
/// checkpoint.
#[test]
fn checkpoints_are_written_as_hugging_face_folders() {
    let stage = Stage::new("save-hf");
    stage.recipe("same", |_| {}, 0);
    let flags = "--tp 2 --dp 2 --zero-stage 1 --save-every 1 --steps 4 --checkpoint.keep_last 2 --save-hf bf16 --load";
    let flags: Vec<_> = flags.split(' ').chain([FIXTURE]).collect();
    stage.losses("run", &flags);
    let run = stage.0.join("run");
    let names = |folder: &str| {
        let names = fs::read_dir(run.join(folder)).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names: BTreeSet<_> = names.filter(|name| name.starts_with("step-")).collect();
        names
    };
    assert_eq!(names("hugging-face"), names("checkpoints"));
    assert_eq!(names("checkpoints").len(), 2);
    for name in names("checkpoints") {
        let written = run.join("hugging-face").join(&name);
        assert!(written.join("generation_config.json").is_file());
        let written = HfFolder::open(written).unwrap();
        let checkpoint = Checkpoint::open(run.join("checkpoints").join(&name)).unwrap();
        for key in written.keys() {
            let whole = TensorSlice::whole(&written.tensor(&key).unwrap().shape);
            let [narrow, wide] = [&written as &dyn TensorSource, &checkpoint].map(|source| {
                let dtype = source.tensor(&key).unwrap().dtype;
                let bytes = source.read(&key, &whole).unwrap();
                let data = TensorData::from_bytes_vec(bytes, [whole.len()], dtype.dtype());
                (dtype, data.convert_dtype(DType::BF16))
            });
            assert_eq!((narrow.0, wide.0), (ElementType::Bf16, ElementType::F32));
            assert_eq!(narrow.1, wide.1, "{name} {key}");
        }
    }
    // `convert` copies the other files from the folder that the run was loaded from.
    let converted = stage.0.join("converted");
    let mut convert = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    let output = convert
        .arg("convert")
        .arg(&run)
        .arg(&converted)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let file = "generation_config.json";
    assert_eq!(
        fs::read(converted.join(file)).unwrap(),
        fs::read(Path::new(FIXTURE).join(file)).unwrap()
    );
    let tokens = |folder: &Path| HfFolder::open(folder).unwrap().config().tokens.clone();
    assert_eq!(tokens(&converted), tokens(FIXTURE.as_ref()));
    let flags = [
        "--save-hf",
        "--save-every",
        "1",
        "--checkpoint.keep_last",
        "1",
    ];
    stage.fails("same", &flags, "(--checkpoint.keep_last) to at least 2");
    let flags = [&flags[..4], &["2", "--checkpoint.asynchronous"]].concat();
    stage.fails("same", &flags, "(--checkpoint.keep_last) to at least 3");
    let odd: fn(&mut TransformerConfig) = |model| model.norm_zero_centered = true;
    stage.recipe("odd", odd, 0);
    stage.fails(
        "odd",
        &["--save-hf"],
        "llama requires norm_zero_centered = false",
    );
}

#[test]
fn what_does_not_fit_is_said_before_the_start() {
    let stage = Stage::new("errors");
    stage.recipe("deeper", |model| model.layers = 3, 0);
    stage.recipe("rounder", |model| model.norm_epsilon = 1e-5, 0);
    stage.recipe("writes", |_| {}, 4);
    let load = ["--load", FIXTURE];
    stage.fails("deeper", &load, "model.layers is 3, not 2");
    stage.fails("rounder", &load, "model.norm_epsilon is 0.00001, not 1e-6");
    let nowhere = Path::new(FIXTURE).join("nowhere");
    let nowhere = nowhere.to_str().unwrap();
    stage.fails("rounder", &["--load", nowhere], "nowhere");
    let set = "set data.tokenizer (--tokenizer), or set sample.tokens to 0";
    stage.fails("writes", &[], set);
}
