//! Tests that no process is left when a part of a run ends.

use std::os::unix::process::ExitStatusExt;
use std::time::Instant;

use burn_megatron_test_support::skipped;

use super::run::{NO_MPIRUN, Way, both_ways, has_mpirun, kill, launch, until};

#[test]
fn the_first_failure_decides_the_exit_code() {
    both_ways(|way| {
        // The other ranks are notified, and end with their own exit codes.
        let script =
            "if [ $R = 2 ]; then exit 3; fi; trap 'exit 4' TERM; while :; do sleep 0.05; done";
        let ended = launch(way, 3, &[], script).end();
        ended.code(3);
        ended.summary(&["rank 2 ended with exit code 3 after T s"]);
        let of_shells = ended.err.matches("Terminated").count();
        assert_eq!(ended.err.lines().count(), 1 + of_shells, "{}", ended.err);
    });
}

/// Kills a rank. One of the other ranks is stopped, one ignores SIGTERM, and one has child processes.
#[test]
fn nothing_outlives_a_rank_that_fails() {
    both_ways(|way| {
        let script = "case $R in
            0) trap '' TERM; sleep 61; sleep 62 ;;
            1) exec sleep 60 ;;
            2) kill -STOP $$ ;;
            3) sleep 63 & sleep 64 ;;
        esac";
        let run = launch(way, 4, &[], script);
        for process in ["sleep 61", "sleep 63", "sleep 64"] {
            run.await_processes(process, 1);
        }
        until(|| {
            run.processes()
                .iter()
                .any(|(process, _)| is_stopped(*process))
        });
        let began = Instant::now();
        kill(run.await_processes("sleep 60", 1)[0], libc::SIGKILL);
        let ended = run.end();
        ended.code(137);
        ended.summary(&[
            "rank 1 ended by signal 9 (SIGKILL) after T s",
            "ranks 0, 2 had to be killed",
        ]);
        assert_eq!(
            ended.err.lines().count(),
            2 + ended.err.matches("Terminated").count(),
            "{}",
            ended.err
        );
        let took = began.elapsed().as_secs_f64();
        assert!(took >= 7.0, "5 s and 2 s: {took}");
    });
}

fn is_stopped(process: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(") ")
        .next()
        .is_some_and(|state| state.starts_with('T'))
}

/// A rank that succeeds may leave a child process that keeps its output open.
#[test]
fn nothing_outlives_a_rank_that_succeeds() {
    both_ways(|way| {
        let ended = launch(way, 2, &[], "sleep 71 & echo done").end();
        ended.code(0);
        assert_eq!(ended.sorted(), ["[rank 0] done", "[rank 1] done"]);
    });
}

#[test]
fn nothing_outlives_the_launcher() {
    both_ways(|way| {
        let script = "trap '' TERM INT HUP; sleep 67; sleep 68";
        let run = launch(way, 3, &[], script);
        run.await_processes("sleep 67", 3);
        run.signal(libc::SIGKILL);
        until(|| {
            run.processes()
                .iter()
                .all(|(process, _)| *process == run.pid())
        });
        let (ended, left) = run.end_with();
        assert_eq!((ended.status.signal(), left), (Some(libc::SIGKILL), vec![]));
    });
}

#[test]
fn nothing_outlives_mpirun() {
    if !has_mpirun() {
        return skipped(NO_MPIRUN);
    }
    let run = launch(Way::Mpirun, 2, &[], "trap '' TERM; sleep 69");
    run.await_processes("sleep 69", 2);
    let mpirun = run.processes().into_iter().find(|(_, called)| {
        called.starts_with("mpirun -n 2") || called.contains("bin/mpirun -n 2")
    });
    kill(mpirun.unwrap().0, libc::SIGKILL);
    let ended = run.end();
    ended.code(137);
    ended.summary(&["mpirun ended by signal 9 (SIGKILL) before its ranks did"]);
}

/// Checks that all processes end if the guard is killed. The guard ends the ranks when the launcher dies.
#[test]
fn nothing_outlives_the_guard() {
    both_ways(|way| {
        let run = launch(way, 2, &[], "trap '' TERM; sleep 70; exit 0");
        run.await_processes("sleep 70", 2);
        kill(
            run.await_processes("/bin/sh -c trap '' HUP", 1)[0],
            libc::SIGKILL,
        );
        let ended = run.end();
        ended.code(137);
        ended.summary(&[
            "the guard process ended by signal 9 (SIGKILL) before the ranks did",
            "ranks 0, 1 had to be killed",
        ]);
    });
}

/// Checks that a rank ends if its slot is killed, the mpirun process that holds the place of the rank.
#[test]
fn a_rank_ends_with_its_slot() {
    if !has_mpirun() {
        return skipped(NO_MPIRUN);
    }
    let run = launch(Way::Mpirun, 2, &[], "trap '' TERM; sleep 73; exit 0");
    run.await_processes("sleep 73", 2);
    let slots = format!("{} launch-slot", env!("CARGO_BIN_EXE_burn-megatron"));
    kill(run.await_processes(&slots, 2)[0], libc::SIGKILL);
    let ended = run.end();
    ended.code(137);
    ended.summary(&["mpirun ended with exit code 137 before its ranks did"]);
}
