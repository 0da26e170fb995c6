//! Tests that a resumed run keeps the implementation of GELU that was selected at its first start.

use std::fs;

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::kernel_selection::EpilogueFusion;

use super::*;
use crate::flags::parse;
use crate::recipe::DEFAULT_RECIPE;

#[test]
fn a_resumed_run_keeps_the_epilogues_of_its_first_start() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let text = folder.path().join("text.txt");
    fs::write(&text, "a run that is resumed keeps its bits. ".repeat(400)).unwrap();
    let [path, text] = [&run, &text].map(|path| path.to_str().unwrap());
    let model = "--tp 1 --pp 1 --dp 1 --micro-batch-size 2 --global-batch-size 2 --set model.layers=1 \
                 --set model.context=16 --set model.hidden=16 --set model.heads=2";
    let families = Families::transformers();
    let args = |steps: &str, more: &str| {
        let flags = format!("{model} --steps {steps} {more} --resume-allow-change train.steps");
        let paths = ["--run-dir", path, "--data", text];
        parse::<PretrainArgs>(&[&flags.split_whitespace().collect::<Vec<_>>()[..], &paths].concat())
            .unwrap()
    };
    let train = |args: &PretrainArgs| {
        let unreached = |grace| Ok(Interrupt::new(grace));
        run_until(args, &families, DEFAULT_RECIPE, unreached).unwrap();
    };
    let measured = "--resume auto --kernels epilogue_fusion=measured";
    train(&args("1", measured));
    // A CPU does not support epilogues.
    let config = || fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(config().contains("epilogue_fusion = false"), "{}", config());
    let saved = Checkpoint::open(run.join("checkpoints")).unwrap();
    assert_eq!(saved.metadata().config["kernels"]["epilogue_fusion"], false);

    // Simulates a GPU on which epilogues are faster.
    let chosen = config().replace("epilogue_fusion = false", "epilogue_fusion = true");
    fs::write(run.join("config.toml"), chosen).unwrap();
    let resolved = |more: &str| {
        let recipe = Recipe::resolve(&args("2", more), &families, DEFAULT_RECIPE);
        recipe.unwrap().recipe.kernels.epilogue_fusion
    };
    assert_eq!(resolved(measured), EpilogueFusion::On);
    assert_eq!(resolved("--resume auto"), EpilogueFusion::On);
    let fixed = "--resume auto --kernels epilogue_fusion=false";
    assert_eq!(resolved(fixed), EpilogueFusion::Off);

    // Simulates a run that ended before the measurement. The next start measures.
    let open = config().replace("epilogue_fusion = true", "epilogue_fusion = \"measured\"");
    fs::write(run.join("config.toml"), open).unwrap();
    assert_eq!(resolved(measured), EpilogueFusion::Measured);
    train(&args("2", measured));
    assert!(config().contains("epilogue_fusion = false"), "{}", config());
}
