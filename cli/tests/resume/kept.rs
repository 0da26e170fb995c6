//! Tests that nothing is lost: unusable and discarded checkpoints, the end of a run, and its settings.

use std::fs;

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron_train::metrics::MetricsRecord;

use super::stage::{SAME, Stage, assert_timed_once, last_line, text};

/// Moves a checkpoint to another disk, which is not mounted.
#[test]
fn a_checkpoint_that_cannot_be_read_now_stops_the_run_unless_it_is_skipped() {
    let stage = Stage::new("unmounted");
    stage.succeeds("run", &SAME);
    let newest = stage.file("run", "checkpoints/step-00000060");
    let disk = stage.0.join("disk");
    fs::rename(&newest, &disk).unwrap();
    std::os::unix::fs::symlink(&disk, &newest).unwrap();
    let unmounted = stage.0.join("unmounted");
    fs::rename(&disk, &unmounted).unwrap();
    let auto = [&SAME[..], &["--resume", "auto"]].concat();
    stage.fails("run", &auto, "skip it with --resume-skip 60");
    let said = stage.succeeds("run", &[&auto[..], &["--resume-skip", "60"]].concat());
    assert!(said.contains("resumed  after step 50, "), "{said}");
    let aside = "step-00000060.unreadable-io";
    let expected = ["step-00000050", "step-00000060", aside];
    assert_eq!(stage.checkpoints("run"), expected);
    // The link is still a link, and its target is intact.
    fs::rename(&unmounted, &disk).unwrap();
    let link = stage.file("run", "checkpoints").join(aside);
    assert!(link.is_symlink());
    Checkpoint::open(&link)
        .unwrap()
        .verify(&mut |_| {})
        .unwrap();
}

#[test]
fn going_back_discards_later_checkpoints_only_when_told_and_once_a_new_one_is_there() {
    let stage = Stage::new("back");
    let flags = [
        &SAME[..],
        &["--save-every", "20", "--checkpoint.keep_last", "3"],
    ]
    .concat();
    stage.succeeds("run", &flags);
    let step = stage.file("run", "checkpoints/step-00000020");
    let back = [&flags[..], &["--resume", step.to_str().unwrap()]].concat();
    let before = stage.metrics("run");
    let raw = stage.raw_metrics("run");
    let says = "later steps than 20: 40, 60; discard them with --discard-later, or keep them and use another \
                --run-dir";
    stage.fails("run", &back, says);
    let lone = [&flags[..], &["--resume", "auto", "--discard-later"]].concat();
    stage.fails(
        "run",
        &lone,
        "--discard-later requires resuming from an earlier checkpoint",
    );
    let discards = [&back[..], &["--discard-later"]].concat();
    let ended = stage.interrupt("run", &discards, 62, libc::SIGKILL);
    assert_eq!(ended.status.code(), None);
    let expected = [
        "step-00000020",
        "step-00000040.discarded",
        "step-00000060.discarded",
    ];
    assert_eq!(stage.checkpoints("run"), expected);
    assert!(stage.raw_metrics("run").starts_with(&raw));
    let said = stage.succeeds("run", &[&flags[..], &["--resume", "auto"]].concat());
    assert!(said.contains("resumed  after step 20, "), "{said}");
    assert!(
        said.contains("aside    step-00000040.discarded, "),
        "{said}"
    );
    let expected = ["step-00000020", "step-00000040", "step-00000060"];
    assert_eq!(stage.checkpoints("run"), expected);
    assert_eq!(stage.metrics("run"), before);
    assert!(stage.raw_metrics("run").starts_with(&raw));
}

#[test]
fn every_run_saves_its_end_and_where_it_is_interrupted() {
    let stage = Stage::new("end").without_a_table();
    let output = stage.run("whole", &SAME);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(stage.checkpoints("whole"), ["step-00000060"]);
    let path = stage.file("whole", "checkpoints/step-00000060");
    let says = format!("the weights are in {}", path.display());
    assert_eq!(last_line(&output.stdout), says);

    let ended = stage.interrupt("ended", &SAME, 5, libc::SIGTERM);
    assert_eq!(ended.status.code(), Some(130), "{}", text(&ended));
    let said = stage.resumes("ended", &[]);
    assert!(said.contains("resumed  after step "), "{said}");
    stage.assert_same_metrics("whole", "ended");

    let few = ["--steps", "2", "--no-save"];
    let output = stage.run("lost", &few);
    assert!(output.status.success(), "{}", text(&output));
    assert!(!stage.file("lost", "checkpoints").exists());
    assert!(last_line(&output.stdout).contains("the weights were not saved"));
    stage.fails(
        "lost",
        &[&few[..], &["--resume", "auto"]].concat(),
        "no checkpoint to resume from",
    );
}

#[test]
fn a_run_folder_alone_goes_on_with_its_recipe_and_saves_no_less() {
    let stage = Stage::new("alone").without_a_table();
    let first = [&SAME[..], &["--steps", "20", "--save-every", "10"]].concat();
    stage.succeeds("run", &first);
    let config = || fs::read_to_string(stage.file("run", "config.toml")).unwrap();
    let before = (config(), stage.files("run"));
    let said = stage.resumes("run", &[]);
    assert!(said.contains("nothing to do: "), "{said}");
    assert_eq!(stage.files("run"), before.1);
    // A run that was killed between its last save and its end still evaluates and writes its files.
    let path = stage.file("run", "metrics.jsonl");
    let (metrics, records) = (fs::read_to_string(&path).unwrap(), stage.metrics("run"));
    let cut = metrics.trim_end().rfind('\n').unwrap() + 1;
    assert!(metrics[cut..].contains("held_out"));
    fs::write(&path, &metrics[..cut]).unwrap();
    fs::remove_file(stage.file("run", "sample.txt")).unwrap();
    stage.resumes("run", &[]);
    assert_eq!(stage.metrics("run"), records);
    assert!(stage.file("run", "sample.txt").exists());
    let said = stage.resumes("run", &[]);
    assert!(said.contains("nothing to do: "), "{said}");
    let says = "--no-save would discard the result";
    let lossy = ["--steps", "40", "--resume", "auto", "--no-save"];
    stage.fails("run", &lossy, says);

    // An extension that is killed before its first save keeps the settings of the existing checkpoints. The completed
    // warm-up does not change.
    let longer = ["--steps", "40", "--resume-allow-change", "train.steps"];
    let run = stage.0.join("run");
    let alone = [&["--resume", run.to_str().unwrap()], &longer[..]].concat();
    let ended = stage.interrupt_of(stage.alone(&alone), "run", 22, libc::SIGKILL);
    assert_eq!(ended.status.code(), None);
    assert_eq!(config(), before.0);
    let said = stage.resumes("run", &longer);
    assert!(said.contains("resumed  after step 20, "), "{said}");
    let expected = [10, 20, 30, 40].map(|step| format!("step-{step:08}"));
    assert_eq!(stage.checkpoints("run"), expected);
    assert!(config().contains("steps = 40"));
    assert_eq!(
        fs::read_to_string(stage.file("run", "config-1.toml")).unwrap(),
        before.0
    );
    assert_timed_once(&stage.file("run", "timings.jsonl"), 40);
    let is_step = |record: &&MetricsRecord| matches!(record, MetricsRecord::Step(_));
    assert_eq!(stage.metrics("run").iter().filter(is_step).count(), 40);
    // Extend the run with the flags of the first start, without the flag values that were saved.
    let longer = ["--steps", "60", "--resume", "auto"];
    let longer = [&SAME[..], &longer, &["--resume-allow-change", "train"]].concat();
    stage.succeeds("run", &longer);
    let expected = [10, 20, 30, 40, 50, 60].map(|step| format!("step-{step:08}"));
    assert_eq!(stage.checkpoints("run"), expected);
}
