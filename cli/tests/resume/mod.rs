//! Tests that `burn-megatron pretrain` can be interrupted and resumed with the results of an uninterrupted run.
#![cfg(unix)]

mod kept;
mod stage;

use std::fs;
use std::process::Command;

use stage::{SAME, Stage, assert_timed_once, last_line, text};

#[test]
fn an_interrupted_run_goes_on_with_the_same_metrics() {
    let stage = Stage::new("interrupted");
    let whole = stage.succeeds("whole", &SAME);
    assert!(whole.contains("saved step 60 in "), "{whole}");
    assert_eq!(
        stage.checkpoints("whole"),
        ["step-00000050", "step-00000060"]
    );
    for (name, signal, asynchronous) in [
        ("terminated", libc::SIGTERM, "false"),
        ("pressed", libc::SIGINT, "true"),
    ] {
        let auto = [
            "--resume",
            "auto",
            "--checkpoint.asynchronous",
            asynchronous,
        ];
        let flags = [&SAME[..], &auto].concat();
        let ended = stage.interrupt(name, &flags, 23, signal);
        let said = text(&ended);
        assert_eq!(ended.status.code(), Some(130), "{said}");
        let folder = stage.0.join(name);
        let says = format!("resume with pretrain --resume {}\n", folder.display());
        assert!(said.contains(&says), "{said}");
        let made = stage.steps(name);
        assert!((23..60).contains(&made));
        let saved = format!("step-{made:08}");
        assert!(stage.checkpoints(name).contains(&saved), "{saved}");
        let path = stage.file(name, "checkpoints").join(saved);
        assert_eq!(
            last_line(&ended.stdout),
            format!("the weights are in {}", path.display())
        );
        let said = stage.succeeds(name, &flags);
        assert!(
            said.contains(&format!("resumed  after step {made}, ")),
            "{said}"
        );
        stage.assert_same_metrics("whole", name);
        assert_timed_once(&stage.file(name, "timings.jsonl"), 60);
        // Resuming a finished run changes nothing.
        let before = stage.files(name);
        let said = stage.succeeds(name, &flags);
        assert!(said.contains("nothing to do: "), "{said}");
        assert_eq!(stage.files(name), before);
    }
}

#[test]
fn a_killed_run_goes_on_from_its_newest_checkpoint() {
    let stage = Stage::new("killed");
    stage.succeeds("whole", &SAME);
    let auto = [&SAME[..], &["--resume", "auto"]].concat();
    // Kill before the first checkpoint, then after several checkpoints.
    for steps in [3, 25] {
        let ended = stage.interrupt("killed", &auto, steps, libc::SIGKILL);
        assert_eq!(ended.status.code(), None);
    }
    let said = stage.succeeds("killed", &auto);
    assert!(said.contains("resumed  after step "), "{said}");
    stage.assert_same_metrics("whole", "killed");
    assert_timed_once(&stage.file("killed", "timings.jsonl"), 60);
}

#[test]
fn a_broken_checkpoint_is_passed_over() {
    let stage = Stage::new("broken");
    stage.succeeds("run", &SAME);
    let newest = stage.file("run", "checkpoints/step-00000060");
    let part = newest.join("part-00001.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 4;
    fs::write(&part, bytes).unwrap();
    let broken = fs::read(&part).unwrap();
    let (before, raw) = (stage.metrics("run"), stage.raw_metrics("run"));
    let said = stage.succeeds("run", &[&SAME[..], &["--resume", "auto"]].concat());
    assert!(said.contains("skipped a checkpoint"), "{said}");
    assert!(said.contains("resumed  after step 50, "), "{said}");
    assert_eq!(stage.metrics("run"), before);
    assert!(stage.raw_metrics("run").starts_with(&raw));
    // The checkpoint is kept under another name and not counted. Every listing shows it.
    let aside = "step-00000060.unreadable-corrupt";
    let expected = ["step-00000050", "step-00000060", aside];
    assert_eq!(stage.checkpoints("run"), expected);
    let kept = stage.file("run", "checkpoints").join(aside);
    assert_eq!(
        fs::read(kept.join("part-00001.safetensors")).unwrap(),
        broken
    );
    assert!(said.contains(&format!("aside    {aside}, ")), "{said}");
    let mut inspect = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    let inspect = inspect
        .args(["checkpoint", "inspect"])
        .arg(stage.0.join("run"));
    let said = text(&inspect.output().unwrap());
    assert!(said.contains(&format!("aside       {aside}, ")), "{said}");
}

#[test]
fn a_run_that_was_killed_before_its_configuration_was_written_begins() {
    let stage = Stage::new("unconfigured");
    let staged = stage.file("run", "config.toml.1a-1-0.partial");
    fs::create_dir_all(staged.parent().unwrap()).unwrap();
    fs::write(&staged, "[model]\nvocab").unwrap();
    stage.succeeds("run", &[&SAME[..], &["--resume", "auto"]].concat());
    assert!(!staged.exists());
    assert!(stage.steps("run") > 0);
}

#[test]
fn what_would_be_another_run_is_refused() {
    let stage = Stage::new("refused");
    stage.succeeds("run", &SAME);
    let path = stage.file("run", "checkpoints");
    let path = path.to_str().unwrap();
    let from = ["--resume", path];
    stage.fails("run", &[], "exists already; resume it with --resume auto");
    stage.fails(
        "new",
        &[&from[..], &["--lr", "0.5"]].concat(),
        "train.learning_rate = 0.001",
    );
    stage.fails(
        "new2",
        &[&from[..], &["--seed", "9"]].concat(),
        "train.seed = 1",
    );
    let precision = ["--precision", "bf16"];
    stage.fails(
        "new3",
        &[&from[..], &precision].concat(),
        "data_parallel.precision",
    );
    stage.fails(
        "run",
        &["--resume", "auto", "--seed", "9"],
        "train.seed = 1",
    );
    stage.fails("text", &["--resume", "auto"], "is not a run folder");
    stage.fails("text", &from, "exists already");
    let strange = [&from[..], &["--resume-allow-change", "train.step"]].concat();
    stage.fails("new4", &strange, "expected a key of the recipe");
    let recipe = fs::read_to_string(stage.0.join("recipe.toml")).unwrap();
    let other = recipe.replace("layers = 2", "layers = 3");
    fs::write(stage.0.join("recipe.toml"), other).unwrap();
    stage.fails("deeper", &from, "model.layers = 2, and this run has 3");
    fs::write(stage.0.join("recipe.toml"), recipe).unwrap();
    let manifest = stage.file("run", "checkpoints/step-00000060/manifest.json");
    let whole = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, &whole[..whole.len() / 2]).unwrap();
    stage.fails("damaged", &from, "manifest.json");
    fs::write(&manifest, whole).unwrap();
    steps_without_their_checkpoints(&stage);
    // Other text is different data.
    fs::write(stage.0.join("text/0.rs"), "fn other() {}\n".repeat(200)).unwrap();
    stage.fails("new5", &from, "data_fingerprint");
}

/// Checks that nothing restarts at step 0 if the disk of the checkpoints is not mounted or a file of the run is lost.
fn steps_without_their_checkpoints(stage: &Stage) {
    let auto = ["--resume", "auto"];
    let (checkpoints, aside) = (stage.file("run", "checkpoints"), stage.0.join("aside"));
    fs::rename(&checkpoints, &aside).unwrap();
    let lost =
        "has no checkpoint to resume from, but its timings.jsonl lists a checkpoint of step 60";
    stage.fails("run", &auto, lost);
    fs::create_dir(&checkpoints).unwrap();
    stage.fails("run", &auto, lost);
    let (timings, metrics) = (
        stage.file("run", "timings.jsonl"),
        stage.file("run", "metrics.jsonl"),
    );
    fs::rename(&timings, stage.0.join("timings")).unwrap();
    stage.fails(
        "run",
        &auto,
        "but its metrics.jsonl has 60 steps: mount or restore",
    );
    fs::rename(stage.0.join("timings"), timings).unwrap();
    fs::remove_dir(&checkpoints).unwrap();
    fs::rename(&aside, &checkpoints).unwrap();

    let newest = stage.file("run", "checkpoints/step-00000060");
    fs::rename(&newest, &aside).unwrap();
    let kept = fs::read(&metrics).unwrap();
    fs::remove_file(&metrics).unwrap();
    assert!(
        Command::new("mkfifo")
            .arg(&metrics)
            .status()
            .unwrap()
            .success()
    );
    let said = stage.fails_somewhere("run", &auto, "metrics.jsonl': it is a pipe");
    let missing = "the checkpoint of step 60 is not in";
    assert!(said.contains(missing), "{said}");
    fs::remove_file(&metrics).unwrap();
    fs::write(metrics, kept).unwrap();
    fs::rename(&aside, &newest).unwrap();

    let config = stage.file("run", "config.toml");
    let kept = fs::read(&config).unwrap();
    fs::write(&config, "# Lost.\n").unwrap();
    stage.fails("run", &auto, "config.toml has no settings: restore it");
    fs::write(&config, kept).unwrap();
}

#[test]
fn another_layout_and_a_longer_run_go_on() {
    let stage = Stage::new("layout");
    stage.succeeds("run", &["--dp", "2", "--zero-stage", "3", "--steps", "20"]);
    let path = stage.file("run", "checkpoints/step-00000010");
    let from = ["--resume", path.to_str().unwrap()];
    let other = ["--tp", "2", "--pp", "2", "--steps", "20"];
    let said = stage.succeeds("other", &[&from[..], &other].concat());
    assert!(said.contains("resumed  after step 10, "), "{said}");
    let losses = |run, skip| -> Vec<f64> {
        let text = fs::read_to_string(stage.file(run, "metrics.jsonl")).unwrap();
        let steps = text
            .lines()
            .filter(|line| line.contains("\"kind\":\"step\""));
        let loss = |line: &str| {
            let (_, rest) = line.split_once("\"loss\":").unwrap();
            rest.split_once(',').unwrap().0.parse().unwrap()
        };
        steps.skip(skip).map(loss).collect()
    };
    let (same, other) = (losses("run", 10), losses("other", 0));
    assert_eq!((same.len(), other.len()), (10, 10));
    for (a, b) in same.iter().zip(&other) {
        assert!((a / b - 1.0).abs() < 1e-4, "{a} {b}");
    }
    let longer = ["--dp", "2", "--zero-stage", "3", "--resume", "auto"];
    stage.fails("run", &longer, "train.steps = 20, and this run has 60");
    let changing = ["--resume-allow-change", "train.steps,train.warmup_steps"];
    stage.succeeds("run", &[&longer[..], &changing].concat());
    assert_eq!(losses("run", 0).len(), 60);
    assert_timed_once(&stage.file("run", "timings.jsonl"), 60);
}

#[test]
fn weights_alone_begin_another_run() {
    let stage = Stage::new("weights");
    stage.succeeds("run", &["--dp", "2", "--steps", "20"]);
    let path = stage.file("run", "checkpoints");
    let load = ["--load", path.to_str().unwrap()];
    let said = stage.succeeds(
        "new",
        &[&load[..], &["--lr", "0.002", "--seed", "4"]].concat(),
    );
    assert!(said.contains("weights  "), "{said}");
    let first = |run| {
        let text = fs::read_to_string(stage.file(run, "metrics.jsonl")).unwrap();
        // The first line is the version.
        text.lines().nth(1).unwrap().to_string()
    };
    assert!(first("new").contains("\"step\":1,"));
    assert_ne!(first("new"), first("run"));
    let deeper = fs::read_to_string(stage.0.join("recipe.toml")).unwrap();
    let deeper = deeper.replace("layers = 2", "layers = 3");
    fs::write(stage.0.join("recipe.toml"), deeper).unwrap();
    stage.fails("deeper", &load, "model.layers is 3, not 2");
    let settings = ["--lenient", "settings"];
    stage.fails_somewhere(
        "otherwise",
        &[&load[..], &settings].concat(),
        "has no model/blocks.2.",
    );
    stage.succeeds(
        "lenient",
        &[&load[..], &["--lenient", "missing", "--steps", "2"]].concat(),
    );
}
