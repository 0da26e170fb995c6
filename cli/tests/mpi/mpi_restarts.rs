//! Tests runs whose processes are killed, and that `launch --max-restarts` restarts. Each sample must be used once.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron_train::metrics::{MetricsRecord, StepMetrics, read_metrics};
use serde_json::Value;

use crate::processes::{Ended, PROGRAM, Stage, end, run};

/// Timeout for a run to reach its next kill, and for a run to end.
const PATIENCE: Duration = Duration::from_secs(120);
const RANKS: usize = 4;
const SIGNALS: [i32; 4] = [libc::SIGKILL, libc::SIGABRT, libc::SIGILL, libc::SIGSEGV];

/// Run whose processes are killed.
struct Killed {
    stage: Stage,
    kills: usize,
    /// The minimum number of steps between two kills.
    every: usize,
}

impl Killed {
    fn new(name: &str, kills: usize) -> Self {
        Self {
            stage: Stage::new(name),
            kills,
            every: 8,
        }
    }

    fn flags(&self) -> Vec<String> {
        // A kill may be a few steps late.
        let steps = (self.every + 4) * (self.kills + 2);
        let text = format!(
            "--dp {RANKS} --pp 1 --tp 1 --precision f64 --compute-threads 1 --steps {steps} --save-every 5 --checkpoint.keep_last 2"
        );
        text.split(' ').map(str::to_owned).collect()
    }

    /// Runs the same settings without kills, on threads.
    fn undisturbed(&self) {
        let mut command = self.stage.command(PROGRAM);
        let command = self.stage.pretrain(&mut command, "undisturbed");
        let ended = run(command.args(self.flags()), PATIENCE);
        assert_eq!(ended.code, Some(0), "{}", ended.all());
    }

    fn start(&self) -> Child {
        let mut command = self.stage.command(PROGRAM);
        let (ranks, kills) = (RANKS.to_string(), self.kills.to_string());
        command.args(["launch", "--ranks", &ranks, "--max-restarts", &kills]);
        command.args(["--restart-delay", "0.1"]);
        command.arg("--");
        let command = self.stage.pretrain(&mut command, "run");
        // Use files: pipes are not read during the run, and a full pipe would block it.
        let file = |name: &str| File::create(self.stage.path().join(name)).unwrap();
        command.stdout(file("stdout")).stderr(file("stderr"));
        command.args(self.flags()).spawn().unwrap()
    }

    /// Runs to the end, with the kills.
    fn run(&self) -> Ended {
        let child = self.start();
        let mut target = self.every;
        for kill in 0..self.kills {
            let reached = self.await_step(target);
            let (process, called) = self.victim(kill);
            self.kill(process, SIGNALS[kill % SIGNALS.len()]);
            println!("kill {kill} after step {reached}: {process} {called:.60}");
            target = reached + self.every;
        }
        // The files are complete once the launcher has ended.
        let ended = end(child, PATIENCE);
        Ended {
            output: self.stage.read("stdout"),
            errors: self.stage.read("stderr"),
            ..ended
        }
    }

    /// Waits until the run has reached a step, and returns the last step.
    fn await_step(&self, step: usize) -> usize {
        let until = Instant::now() + PATIENCE;
        loop {
            let last = steps(&self.stage.path().join("run"))
                .last()
                .map_or(0, |metrics| metrics.step);
            if last >= step {
                return last;
            }
            assert!(
                Instant::now() < until,
                "step {step} was not reached, but {last}:\n{}",
                self.stage.read("stderr")
            );
            sleep(Duration::from_millis(2));
        }
    }

    /// Sends a signal until the process has ended. At the first SIGSEGV, the handler of a Rust program restores the
    /// default action and returns, because a real fault occurs again. A SIGSEGV from outside must be sent again.
    fn kill(&self, process: u32, signal: i32) {
        let until = Instant::now() + PATIENCE;
        let lives = || self.stage.living().iter().any(|(pid, _)| *pid == process);
        while lives() {
            assert!(Instant::now() < until, "{process} survives {signal}");
            // SAFETY: the call has no pointers.
            unsafe { libc::kill(process as i32, signal) };
            sleep(Duration::from_millis(20));
        }
    }

    /// Returns the process to kill: usually a rank, sometimes mpirun or the guard process.
    fn victim(&self, kill: usize) -> (u32, String) {
        let rank = format!("{PROGRAM} pretrain");
        let program = match kill % 10 {
            5 => "/bin/sh -c trap '' HUP",
            8 => "mpirun",
            _ => &rank,
        };
        let until = Instant::now() + PATIENCE;
        loop {
            let mut living = self.stage.living();
            living.retain(|(_, called)| {
                called.starts_with(program)
                    || (program == "mpirun" && called.contains("bin/mpirun "))
            });
            if !living.is_empty() {
                return living.swap_remove(kill % living.len());
            }
            assert!(Instant::now() < until, "no process {program}");
        }
    }

    /// Checks that every step used the samples of the undisturbed run, and checks the records.
    fn check(&self, ended: &Ended) {
        assert_eq!(ended.code, Some(0), "{}", ended.all());
        self.stage.expect_nothing_left();
        let path = |name: &str| self.stage.path().join(name);
        let [wanted, found] = ["undisturbed", "run"].map(|name| {
            let checkpoint = Checkpoint::open(path(name)).unwrap();
            (steps(&path(name)), checkpoint.metadata().state.clone())
        });
        assert_eq!(
            found.1, wanted.1,
            "the state, with the samples that were taken"
        );
        assert_eq!(found.0.len(), wanted.0.len());
        for (found, wanted) in found.0.iter().zip(&wanted.0) {
            assert_eq!(found, wanted);
        }
        let attempts = self.stage.read("run/restarts.jsonl");
        let attempts: Vec<Value> = attempts
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(attempts.len(), self.kills + 1, "{attempts:#?}");
        for (number, attempt) in attempts.iter().enumerate() {
            assert_eq!(attempt["attempt"], number);
            let is_last = number == self.kills;
            assert_eq!(
                attempt["verdict"],
                if is_last { "complete" } else { "signal" },
                "{attempt}"
            );
            // The attempt started from the newest checkpoint.
            let from = attempt["from_step"].as_u64().unwrap();
            assert!(
                from.is_multiple_of(5) && (from > 0) == (number > 0),
                "{attempt}"
            );
            assert_eq!(attempt["ranks"], RANKS, "{attempt}");
        }
        let restarts = format!("restart {} of {}", self.kills, self.kills);
        assert!(ended.errors.contains(&restarts), "{}", ended.errors);
    }
}

/// Returns the steps of a run, without repeated steps.
fn steps(run: &Path) -> Vec<StepMetrics> {
    let records = read_metrics(&run.join("metrics.jsonl")).unwrap_or_default();
    let steps = records.into_iter().filter_map(|record| match record {
        MetricsRecord::Step(metrics) => Some(metrics),
        _ => None,
    });
    steps.collect()
}

fn expect_every_sample_once(name: &str, kills: usize) {
    let killed = Killed::new(name, kills);
    killed.undisturbed();
    let began = Instant::now();
    let ended = killed.run();
    println!("{kills} kills, {:.1} s", began.elapsed().as_secs_f64());
    killed.check(&ended);
}

#[test]
fn a_killed_run_has_the_bits_of_one_that_was_not() {
    expect_every_sample_once("restarts", 2);
}

/// Checks that a transient bit flip is found by computing the step again, and does not recur after the restart.
#[test]
fn a_run_is_started_again_after_a_transient_fault() {
    let stage = Stage::new("flip");
    let mut command = stage.command(PROGRAM);
    command.args(["launch", "--ranks", "4", "--max-restarts", "1"]);
    command.args(["--restart-delay", "0.1", "--"]);
    let command = stage.pretrain(&mut command, "run");
    let flags = "--tp 2 --dp 2 --pp 1 --save-every 2 --train.check_replay_every 2";
    command.args(flags.split(' '));
    command.args(["--inject", "bit-flip:gradient:7:20@rank=3,step=4,call=5"]);
    let ended = run(command, PATIENCE);
    assert_eq!(ended.code, Some(0), "{}", ended.all());
    for said in [
        "step 4: a transient fault: of three runs from one state, the first differs from the two others: on rank 3 the backward of ",
        "in step 4: a check of a step found: a transient fault",
        "restart 1 of 1 in 0.1 s from step 2",
    ] {
        assert!(ended.errors.contains(said), "{said}: {}", ended.all());
    }
    let cost = "2 steps computed twice, ";
    assert!(ended.output.contains(cost), "{}", ended.all());
}

/// The killed processes include mpirun and the guard process.
#[test]
#[ignore = "minutes: run by hand"]
fn fifty_kills() {
    expect_every_sample_once("fifty", 50);
}

/// Tests a rank that is stopped, and a rank that omits a call.
#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn a_run_goes_on_after_a_rank_was_lost() {
    let stage = Stage::new("lost");
    for (run_dir, fault) in [("stopped", "stop"), ("dropped", "drop")] {
        let mut command = stage.command(PROGRAM);
        command.args(["launch", "--ranks", "2", "--max-restarts", "1", "--"]);
        let command = stage.pretrain(&mut command, run_dir);
        let fault = format!("{fault}@rank=1,step=4,call=0");
        command.args([
            "--dp",
            "2",
            "--save-every",
            "2",
            "--timeout",
            "6",
            "--inject",
            &fault,
        ]);
        let ended = run(command.args(["--heartbeat-timeout", "3"]), PATIENCE);
        assert_eq!(ended.code, Some(0), "{}", ended.all());
        for line in [
            "in step 4: a rank was lost, which may be transient",
            "restart 1 of 1 in 1.0 s from step 2",
        ] {
            assert!(ended.errors.contains(line), "{line}: {}", ended.all());
        }
        stage.expect_nothing_left();
    }
}

/// Checks that a failure that would recur is not retried, and that a run without a run folder is refused.
#[test]
fn an_error_of_a_rank_is_not_repeated() {
    let stage = Stage::new("no-restart");
    let launch = |flags: &[&str]| -> Command {
        let mut command = stage.command(PROGRAM);
        command.args([
            "launch",
            "--ranks",
            "2",
            "--max-restarts",
            "3",
            "--restart-delay",
            "0.1",
            "--",
        ]);
        stage
            .pretrain(&mut command, "run")
            .args(["--dp", "2"])
            .args(flags);
        command
    };
    let ended = run(
        &mut launch(&["--inject", "error@rank=1,step=2,call=0"]),
        PATIENCE,
    );
    assert_eq!(ended.code, Some(1), "{}", ended.all());
    let why = "not restarted: an error of a rank, which would occur again";
    assert!(ended.errors.contains(why), "{}", ended.all());
    stage.expect_nothing_left();

    // A panic may be transient. The fault is not injected again.
    fs::remove_dir_all(stage.path().join("run")).unwrap();
    let ended = run(
        &mut launch(&["--inject", "panic@rank=1,step=2,call=0"]),
        PATIENCE,
    );
    assert_eq!(ended.code, Some(0), "{}", ended.all());
    for line in [
        "in step 2: a rank panicked",
        "restart 1 of 3 in 0.1 s from step 0",
    ] {
        assert!(ended.errors.contains(line), "{line}: {}", ended.all());
    }
    stage.expect_nothing_left();
}
