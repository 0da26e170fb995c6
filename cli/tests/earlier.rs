//! Tests that files of an earlier version of the command can be read: see `fixtures/earlier/make.sh`.

use std::path::{Path, PathBuf};
use std::process::Command;

use burn_megatron_train::metrics::{MetricsRecord, read_metrics};

pub fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/earlier");
    folder.join(name)
}

/// Runs the command, which must succeed. Returns its output.
fn run(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    let output = command.args(arguments).output().unwrap();
    let [out, error] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{arguments:?}\n{out}{error}");
    format!("{out}{error}")
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the training losses and the held-out losses of a run, each with its step.
pub fn losses(run: &Path) -> Vec<(&'static str, usize, f64)> {
    let records = read_metrics(&run.join("metrics.jsonl")).unwrap();
    let losses = records.iter().filter_map(|record| match record {
        MetricsRecord::Step(metrics) => Some(("step", metrics.step, metrics.loss)),
        MetricsRecord::HeldOut(metrics) => Some(("held_out", metrics.step, metrics.loss)),
        _ => None,
    });
    losses.collect()
}

/// Resumes from a checkpoint in a new run folder, and compares with the losses of the earlier version.
///
/// The bound allows for an instruction set that differs from the machine on which the files were created.
fn resumes(name: &str, step: usize, flags: &[&str], bound: f64) {
    let folder = tempfile::tempdir().unwrap();
    let run_folder = folder.path().join("run");
    let old = fixture(name);
    let checkpoint = old.join(format!("checkpoints/step-{step:08}"));
    let recipe = fixture(&format!("{name}.toml"));
    let data = fixture("text");
    let own = [
        "pretrain",
        "--recipe",
        text(&recipe),
        "--data",
        text(&data),
        "--resume",
        text(&checkpoint),
        "--run-dir",
        text(&run_folder),
        "--compute-threads",
        "1",
    ];
    let said = run(&[&own, flags].concat());
    assert!(
        said.contains(&format!("resumed  after step {step}, ")),
        "{said}"
    );
    let mut wanted = losses(&old);
    // The held-out loss at this step was measured before the checkpoint was saved.
    wanted.retain(|(_, at, _)| *at > step);
    let found = losses(&run_folder);
    assert_eq!(found.len(), wanted.len(), "{found:?} {wanted:?}");
    for (wanted, found) in wanted.iter().zip(&found) {
        assert_eq!((wanted.0, wanted.1), (found.0, found.1));
        assert!(
            (wanted.2 / found.2 - 1.0).abs() <= bound,
            "{wanted:?} {found:?}"
        );
    }
}

#[test]
fn a_run_over_every_axis_is_resumed() {
    resumes("dense", 4, &[], 1e-5);
    // Repeat the test in another layout. Random values must not change.
    let other = ["--tp", "1", "--pp", "1", "--dp", "4", "--zero-stage", "3"];
    resumes("dense", 4, &other, 1e-5);
}

/// The bound covers a value that another instruction set rounds to the adjacent FP8 value. This moves the loss by
/// less than the spacing of E4M3, 2^-3, over the number of values per row of a matrix product. The smallest row has
/// 16 values.
#[test]
fn a_run_in_8_bits_is_resumed() {
    resumes("fp8", 2, &[], 0.125 / 16.0);
}

#[test]
fn checkpoints_are_whole_and_keep_their_bits() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "dense/checkpoints/step-00000004",
        "dense/checkpoints/step-00000008",
        "fp8/checkpoints/step-00000002",
    ] {
        let checkpoint = fixture(name);
        run(&["checkpoint", "verify", text(&checkpoint)]);
        let to = folder.path().join(name.replace('/', "-"));
        run(&["checkpoint", "reshard", text(&checkpoint), text(&to)]);
        run(&["checkpoint", "diff", text(&checkpoint), text(&to)]);
        let shown = run(&["checkpoint", "inspect", "--tensors", text(&checkpoint)]);
        assert!(shown.contains("adamw.first/"), "{shown}");
    }
}

#[test]
fn metrics_are_compared_and_plotted() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("loss.svg");
    let (dense, fp8) = (fixture("dense"), fixture("fp8"));
    let said = run(&["compare", text(&dense), text(&fp8), "--svg", text(&svg)]);
    for (run, steps) in [(&dense, 8), (&fp8, 4)] {
        let (kind, step, loss) = *losses(run).last().unwrap();
        assert_eq!((kind, step), ("held_out", steps));
        assert!(said.contains(&format!("{loss:.4}")), "{said}");
    }
    assert!(std::fs::read_to_string(svg).unwrap().contains("<svg"));
}

#[test]
fn a_schedule_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("chart.svg");
    let csv = fixture("schedule.csv");
    let rewritten = |kind| {
        let to = folder.path().join("rewritten.csv");
        let files = ["--svg", text(&svg), "--csv", text(&to)];
        let shape = ["--stages", "2", "--micro-batches", "4"];
        let said = run(&[
            &["schedule", "--pipeline-schedule", kind],
            &shape[..],
            &files,
        ]
        .concat());
        assert!(
            said.contains("2 ranks, 2 stages, 4 micro-batches; total 13"),
            "{said}"
        );
        std::fs::read_to_string(to).unwrap()
    };
    // The earlier version wrote the file before schedules contained gradient reductions. The current version adds
    // them.
    let before = std::fs::read_to_string(&csv).unwrap();
    let now = rewritten(text(&csv));
    assert!(!before.contains("RG") && now.contains("RG 1"), "{now}");
    assert_eq!(now, rewritten("zb-h1"));
    // The schedule can be trained: an earlier run continues with it.
    let flags = [
        "--dp",
        "1",
        "--zero-stage",
        "0",
        "--pipeline-schedule",
        text(&csv),
    ];
    resumes("dense", 4, &flags, 1e-5);
}
