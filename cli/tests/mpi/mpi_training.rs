//! Tests that ranks as processes are bit-equal to ranks as threads.

use std::fs;
use std::time::Duration;

use crate::processes::{PROGRAM, Stage, run};

const PATIENCE: Duration = Duration::from_secs(300);

/// Returns the metrics of a run with threads, with mpirun and with the launcher.
fn metrics(stage: &Stage, ranks: usize, flags: &[&str]) -> [String; 3] {
    let threads = stage.command(PROGRAM);
    let starts = [
        ("threads", threads),
        ("mpirun", stage.mpirun(ranks)),
        ("launch", stage.launch(ranks)),
    ];
    starts.map(|(name, mut command)| {
        let ended = run(stage.pretrain(&mut command, name).args(flags), PATIENCE);
        assert_eq!(ended.code, Some(0), "{name}: {}", ended.all());
        let engine = if name == "threads" {
            "engine   threads"
        } else {
            "engine   mpi"
        };
        assert!(ended.output.contains(engine), "{name}: {}", ended.all());
        stage.expect_nothing_left();
        stage.read(&format!("{name}/metrics.jsonl"))
    })
}

fn expect_equal(name: &str, ranks: usize, flags: &[&str]) {
    let stage = Stage::new(name);
    let [threads, mpirun, launch] = metrics(&stage, ranks, flags);
    assert_eq!(
        threads.lines().count(),
        8,
        "the version, six steps and the held-out text:\n{threads}"
    );
    assert_eq!(mpirun, threads);
    assert_eq!(launch, threads);
    let sample = |run: &str| stage.read(&format!("{run}/sample.txt"));
    assert_eq!(
        [sample("mpirun"), sample("launch")],
        [sample("threads"), sample("threads")]
    );
}

#[test]
fn tensor_and_data_parallel() {
    expect_equal("tp-dp", 4, &["--tp", "2", "--dp", "2"]);
}

#[test]
fn pipeline_and_sharded_in_16_bits() {
    let stage = Stage::new("pp-zero");
    let flags = [
        "--pp",
        "2",
        "--dp",
        "2",
        "--zero-stage",
        "2",
        "--precision",
        "bf16",
    ];
    let [threads, mpirun, launch] = metrics(&stage, 4, &flags);
    assert_eq!(mpirun, threads);
    assert_eq!(launch, threads);
    assert!(
        stage.read("mpirun/trace.json").contains("rank 3"),
        "every rank is in the trace"
    );
}

/// Uses files of 1 to 40 bytes in rows of 32. With 8 tokens per rank, they are on one, two and four of the four
/// ranks.
#[test]
fn documents_on_groups_by_their_length() {
    let mut stage = Stage::new("hybrid");
    let texts = stage.path().join("texts");
    fs::create_dir(&texts).unwrap();
    for number in 0..120 {
        let length = if number % 5 == 0 { 40 } else { 1 + number % 9 };
        let letter = |at| char::from(b'a' + ((number + 3 * at) % 26) as u8);
        let text: String = (0..length).map(letter).collect();
        fs::write(texts.join(format!("{number:03}.txt")), text).unwrap();
    }
    stage.data = "texts".into();
    let flags = [
        "--cp",
        "2",
        "--dp",
        "2",
        "--parallel.hybrid_context_parallel",
        "--parallel.max_seqlen_per_dp_cp_rank",
        "8",
        "--micro-batch-size",
        "1",
        "--set",
        "model.context=32",
        "--set",
        "data.reset_attention=true",
    ];
    let [threads, mpirun, launch] = metrics(&stage, 4, &flags);
    assert_eq!(mpirun, threads);
    assert_eq!(launch, threads);
}

#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn fully_sharded() {
    expect_equal(
        "zero-3",
        4,
        &["--dp", "4", "--zero-stage", "3", "--sp", "false"],
    );
}

/// Rank 0 finds the checkpoint while the other ranks wait, and all ranks resume from it. If no step is left, all
/// ranks exit.
#[test]
fn a_run_folder_goes_on() {
    let stage = Stage::new("goes-on");
    let layout = ["--tp", "2", "--dp", "2"];
    let first = run(
        stage.pretrain(&mut stage.launch(4), "run").args(layout),
        PATIENCE,
    );
    assert_eq!(first.code, Some(0), "{}", first.all());
    assert!(
        first
            .output
            .contains("the weights are in run/checkpoints/step-00000006"),
        "{}",
        first.all()
    );
    let longer = ["--steps", "8", "--resume-allow-change", "train"];
    for (mut command, says) in [
        (stage.mpirun(4), "resumed  after step 6, run/"),
        (stage.launch(4), "nothing to do: "),
        (stage.mpirun(4), "nothing to do: "),
    ] {
        command.args(["pretrain", "--resume", "run"]).args(longer);
        let ended = run(&mut command, PATIENCE);
        assert_eq!(ended.code, Some(0), "{}", ended.all());
        assert!(ended.output.contains(says), "{}", ended.all());
        stage.expect_nothing_left();
    }
    // Invalid settings are rejected by the first rank alone, before the rendezvous.
    let mut command = stage.launch(4);
    command.args(["pretrain", "--resume", "run", "--seed", "77"]);
    let ended = run(&mut command, PATIENCE);
    assert_eq!(ended.code, Some(1), "{}", ended.all());
    assert!(
        ended
            .all()
            .contains("error: run/checkpoints/step-00000008 was saved by a run with train.seed")
    );
}
