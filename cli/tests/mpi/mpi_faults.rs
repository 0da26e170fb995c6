//! Tests the behavior when a rank fails. Each fault is injected into four real processes under the launcher.
//!
//! Every test checks the exit code, the messages, whether any rank waited for a deadline, and that no process is
//! left. The times are printed.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use burn_megatron_test_support::skipped;

use crate::processes::{Ended, Stage, run};

const PATIENCE: Duration = Duration::from_secs(120);
const RANKS: usize = 4;
/// Timeout of a collective.
const DEADLINE: &str = "6";
/// Timeout of a heartbeat.
const SILENCE: &str = "3";

/// Result of a run with an injected fault.
struct Struck {
    ended: Ended,
    folder: String,
}

fn strike(stage: &Stage, fault: &str, flags: &[&str]) -> Struck {
    let mut command = stage.launch(RANKS);
    let command = stage.pretrain(&mut command, "run");
    command.args([
        "--tp",
        "2",
        "--dp",
        "2",
        "--timeout",
        DEADLINE,
        "--first-timeout",
        "12",
    ]);
    command
        .args(["--heartbeat-timeout", SILENCE, "--inject", fault])
        .args(flags);
    let ended = run(command, PATIENCE);
    let over = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();
    let after = struck_at(&ended.errors).map_or(f64::NAN, |at| (over - at).rem_euclid(86_400.0));
    println!(
        "| `{fault}` | {} | {after:.1} s |",
        ended.code.unwrap_or(-1)
    );
    stage.expect_nothing_left();
    let logs = fs::read_dir(stage.path().join("run"))
        .into_iter()
        .flatten()
        .flatten();
    let names = logs.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let folder = names.collect::<Vec<_>>().join(" ");
    Struck { ended, folder }
}

/// Returns the time of day in seconds at which the fault fired, from its warning.
fn struck_at(errors: &str) -> Option<f64> {
    let line = errors
        .lines()
        .find(|line| line.contains(" triggers on rank "))?;
    let time = line
        .split_whitespace()
        .find(|word| word.contains('T') && word.ends_with('Z'))?;
    let time = time.split('T').nth(1)?.trim_end_matches('Z');
    let parts = time.split(':').map(str::parse::<f64>);
    parts
        .map(Result::ok)
        .try_fold(0.0, |sum, part| Some(60.0 * sum + part?))
}

impl Struck {
    fn tells(&self, what: &str) -> &Self {
        assert!(
            self.ended.errors.contains(what),
            "\"{what}\" is missing:\n{}",
            self.ended.all()
        );
        self
    }

    fn exits(&self, code: i32) -> &Self {
        assert_eq!(self.ended.code, Some(code), "{}", self.ended.all());
        self
    }

    /// Checks that the failure was detected without a timeout. The duration is not checked, because it depends on the
    /// machine (the book lists measured times).
    fn at_once(&self) -> &Self {
        for late in ["deadline: after", "has sent no heartbeat"] {
            assert!(!self.ended.errors.contains(late), "{}", self.ended.all());
        }
        self
    }

    /// Checks that each of these ranks has written its call log.
    fn logs(&self, ranks: &[usize]) -> &Self {
        for rank in ranks {
            let name = format!("burn-megatron-calls-rank-{rank}-");
            assert!(self.folder.contains(&name), "rank {rank}: {}", self.folder);
        }
        self
    }

    /// Checks that the failure report is printed once, not by every rank.
    fn once(&self) -> &Self {
        let verdicts = self.ended.errors.matches(" failed: ").count();
        assert_eq!(verdicts, 1, "{}", self.ended.all());
        self
    }
}

#[test]
fn killed() {
    let stage = Stage::new("kill");
    let struck = strike(&stage, "kill@rank=3,step=3,call=5", &[]);
    struck.exits(137).at_once().once().logs(&[0, 1, 2]);
    struck
        .tells("rank 3 ended by signal 9")
        .tells("rank 3 failed: its process");
    struck
        .tells("rank 3 exited without reporting an error, last seen")
        .tells("rank 2 is at call");
    struck.tells("in step 3");
    // A rank reports its position when a step begins.
    assert!(
        !struck.ended.errors.contains("before any call"),
        "{}",
        struck.ended.all()
    );
}

/// mpirun ends the other ranks at once, so the report must be printed before.
#[test]
fn killed_under_mpirun() {
    let stage = Stage::new("mpirun");
    let mut command = stage.mpirun(RANKS);
    let command = stage.pretrain(&mut command, "run");
    let flags = [
        "--tp",
        "2",
        "--dp",
        "2",
        "--inject",
        "kill@rank=3,step=3,call=5",
    ];
    let ended = run(command.args(flags), PATIENCE);
    stage.expect_nothing_left();
    assert_eq!(ended.code, Some(137), "{}", ended.all());
    assert_eq!(
        ended.errors.matches("rank 3 failed: its process").count(),
        1,
        "{}",
        ended.all()
    );
    assert!(
        ended
            .errors
            .contains("rank 3 exited without reporting an error"),
        "{}",
        ended.all()
    );
}

#[test]
fn aborted() {
    let stage = Stage::new("abort");
    let struck = strike(&stage, "abort@rank=1,step=2,call=9", &[]);
    struck
        .exits(134)
        .at_once()
        .once()
        .tells("rank 1 ended by signal 6")
        .tells("in step 2");
}

#[test]
fn segmentation_fault() {
    let stage = Stage::new("segfault");
    let struck = strike(&stage, "segfault@rank=0,step=2,call=9", &[]);
    struck
        .exits(139)
        .at_once()
        .once()
        .tells("rank 0 ended by signal 11")
        .logs(&[1, 2, 3]);
}

/// Checks that all ranks finish the same step, evaluate, and stop.
#[test]
fn terminated() {
    let stage = Stage::new("term");
    let struck = strike(
        &stage,
        "terminate@rank=2,step=2,call=3",
        &["--steps", "200"],
    );
    struck.exits(130).at_once();
    assert!(
        struck
            .ended
            .output
            .contains("interrupted after 2 of 200 steps"),
        "{}",
        struck.ended.all()
    );
}

#[test]
fn stopped() {
    let stage = Stage::new("stop");
    let struck = strike(&stage, "stop@rank=1,step=3,call=7", &[]);
    struck.once().logs(&[0, 2, 3]);
    struck
        .tells("rank 1 failed: its process")
        .tells("has sent no heartbeat for 3 s")
        .tells("in step 3");
    assert_ne!(struck.ended.code, Some(0));
}

#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn never_started() {
    let stage = Stage::new("never");
    let struck = strike(&stage, "never-starts@rank=2", &[]);
    struck.tells("rank 2 has not joined the rendezvous within 12 s");
    assert_ne!(struck.ended.code, Some(0));
}

/// Checks that the launcher does not wait for a rank that exits before it registers.
#[test]
fn failed_before_the_start() {
    let stage = Stage::new("early");
    fs::create_dir(stage.path().join("run")).unwrap();
    let mut command = stage.launch(RANKS);
    let command = stage.pretrain(&mut command, "run");
    let ended = run(command.args(["--tp", "2", "--dp", "2"]), PATIENCE);
    stage.expect_nothing_left();
    assert_eq!(ended.code, Some(1), "{}", ended.all());
    assert!(
        ended.errors.contains("the run folder run exists already"),
        "{}",
        ended.all()
    );
    let verdict = "rank 0 failed: its process ended with exit code 1 before it joined";
    assert!(ended.errors.contains(verdict), "{}", ended.all());
}

#[test]
fn mismatched_call() {
    let stage = Stage::new("call");
    let struck = strike(&stage, "wrong-call@rank=1,step=3,call=5", &[]);
    struck
        .exits(1)
        .at_once()
        .once()
        .logs(&[0, 1, 2, 3])
        .tells("mismatch at call");
    struck.tells("the operations differ").tells("in step 3");
}

#[test]
fn mismatched_shape() {
    let stage = Stage::new("shape");
    let struck = strike(&stage, "shape@rank=1,step=3,call=5", &[]);
    struck
        .exits(1)
        .at_once()
        .once()
        .tells("mismatch at call")
        .tells("the lengths differ")
        .tells("in step 3");
}

/// Checks that a NaN skips the step on every rank, and that the run continues.
#[test]
fn not_a_number() {
    let stage = Stage::new("nan");
    let struck = strike(&stage, "nan@rank=1,step=3,call=5", &[]);
    struck.exits(0).tells("step 3 skipped on every rank");
    assert!(
        struck.ended.output.contains("1 of 6 steps were skipped"),
        "{}",
        struck.ended.all()
    );
}

/// In a step, calls 0 to 5 belong to the first forward, and calls 6 to 10 to its backward.
#[test]
fn panicked_in_the_backward() {
    let stage = Stage::new("panic");
    let struck = strike(&stage, "panic@rank=2,step=2,call=8", &[]);
    struck
        .exits(101)
        .at_once()
        .once()
        .logs(&[0, 1, 2, 3])
        .tells("rank 2 failed: ")
        .tells("in step 2");
}

#[test]
fn an_error() {
    let stage = Stage::new("error");
    let struck = strike(&stage, "error@rank=0,step=2,call=4", &[]);
    struck
        .exits(1)
        .at_once()
        .once()
        .tells("rank 0 failed: fault injection");
}

/// Checks that a rank that loops forever is detected by the timeout of the other ranks, and ended.
#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn spinning() {
    let stage = Stage::new("spin");
    let struck = strike(&stage, "spin@rank=3,step=3,call=5", &[]);
    struck
        .once()
        .tells("deadline: after ")
        .tells(", rank 3 has not joined call");
}

#[test]
fn a_call_left_out() {
    let stage = Stage::new("drop");
    let struck = strike(&stage, "drop@rank=3,step=3,call=5", &[]);
    struck.once();
    assert_ne!(struck.ended.code, Some(0));
}

#[test]
fn a_late_call_does_no_harm() {
    let stage = Stage::new("delay");
    strike(&stage, "delay:2s@rank=1,step=2,call=5", &[]).exits(0);
}

/// Fills the disk of the run folder. Rank 0 reports it, and all ranks end.
#[test]
fn a_full_disk() {
    let stage = Stage::new("disk");
    let small = stage.path().join("small");
    fs::create_dir(&small).unwrap();
    let mount = |args: &[&str]| Command::new(args[0]).args(&args[1..]).arg(&small).status();
    let mounted = mount(&["mount", "-t", "tmpfs", "-o", "size=8k", "none"]);
    if !mounted.is_ok_and(|status| status.success()) {
        return skipped("mounting a small file system needs root");
    }
    let mut command = stage.launch(RANKS);
    let command = stage.pretrain(&mut command, "small/run");
    let ended = run(
        command.args(["--tp", "2", "--dp", "2", "--steps", "400"]),
        PATIENCE,
    );
    let look = AssertUnwindSafe(|| stage.expect_nothing_left());
    let left = catch_unwind(look);
    mount(&["umount"]).unwrap();
    assert!(left.is_ok());
    println!(
        "| full disk | {} | {:.1} s |",
        ended.code.unwrap_or(-1),
        ended.took.as_secs_f64()
    );
    assert_eq!(ended.code, Some(1), "{}", ended.all());
    assert!(
        ended.errors.contains("No space left on device"),
        "{}",
        ended.all()
    );
    assert_eq!(
        ended.errors.matches(" failed: ").count(),
        1,
        "{}",
        ended.all()
    );
}
