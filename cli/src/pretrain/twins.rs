use std::fs;
use std::path::PathBuf;

use burn_megatron_train::metrics::{MetricsRecord, read_metrics};

use super::*;
use crate::flags::parse;

/// A small recipe for each family with published recipes: see docs/src/recipes.md.
const TWINS: [&str; 10] = [
    "llama-3",
    "gpt-3",
    "mixtral",
    "qwen3",
    "qwen3-moe",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss",
    "olmoe",
    "gemma-2",
];

fn recipes() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/recipes")
}

/// Trains a recipe for two steps, and returns its `metrics.jsonl`.
fn two_steps(twin: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let recipe = recipes().join(format!("{twin}-tiny.toml"));
    // Do not use the default data: the text of the repository may change during the test.
    let data = recipes().join("../../LICENSE-APACHE");
    let paths = [&recipe, &data, &run].map(|path| path.to_str().unwrap());
    let flags = ["--steps", "2", "--no-save", "--recipe", paths[0]];
    let flags = [&flags[..], &["--data", paths[1], "--run-dir", paths[2]]].concat();
    let unreached = |grace| Ok(Interrupt::new(grace));
    let args = parse::<PretrainArgs>(&flags).unwrap();
    let code = run_until(&args, &Families::transformers(), "", unreached);
    let code = code.unwrap_or_else(|error| panic!("{twin}: {error}"));
    assert_eq!(code, ExitCode::SUCCESS, "{twin}");
    let metrics = run.join("metrics.jsonl");
    let losses = read_metrics(&metrics).unwrap().into_iter();
    let losses = losses.filter_map(|record| match record {
        MetricsRecord::Step(step) => Some(step.loss),
        _ => None,
    });
    let losses: Vec<_> = losses.collect();
    assert_eq!(losses.len(), 2, "{twin}: {losses:?}");
    assert!(losses[1] < losses[0], "{twin}: {losses:?}");
    fs::read_to_string(metrics).unwrap()
}

/// Trains all recipes in one process, each in its own layout. A second run gives the same bits.
#[test]
fn the_small_recipes_train() {
    let all = fs::read_dir(recipes()).unwrap();
    let all = all.filter(|file| {
        let name = file.as_ref().unwrap().file_name();
        name.to_string_lossy().ends_with("-tiny.toml")
    });
    assert_eq!(all.count(), TWINS.len());
    let metrics = TWINS.map(two_steps);
    let again = 6;
    assert_eq!(two_steps(TWINS[again]), metrics[again]);
}
