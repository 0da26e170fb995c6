//! Tests Ctrl-C and SIGTERM.

use std::thread;
use std::time::Duration;

use super::run::{both_ways, launch, launch_with};

#[test]
fn sigint_and_sigterm_stop_the_ranks() {
    both_ways(|way| {
        for (signal, code, name) in [
            (libc::SIGINT, 130, "2 (SIGINT)"),
            (libc::SIGTERM, 143, "15 (SIGTERM)"),
        ] {
            let script = "trap 'echo stopping; exit 0' TERM; while :; do sleep 0.05; : mark; done";
            let run = launch(way, 2, &[], script);
            // The ranks have set their traps once they sleep.
            run.await_processes("sleep 0.05", 2);
            run.signal(signal);
            let ended = run.end();
            ended.code(code);
            assert_eq!(ended.sorted(), ["[rank 0] stopping", "[rank 1] stopping"]);
            ended.summary(&[
                "interrupted: the ranks have 30 s to stop (interrupt again to kill them)",
                &format!("stopped by signal {name}"),
            ]);
        }
    });
}

#[test]
fn a_second_sigint_and_the_end_of_the_grace_kill() {
    both_ways(|way| {
        let script = "trap '' TERM INT; echo ready; sleep 65; sleep 66";
        for grace in ["20", "0.5"] {
            let run = launch(way, 2, &["--grace", grace], script);
            run.await_processes("sleep 65", 2);
            run.signal(libc::SIGINT);
            if grace == "20" {
                thread::sleep(Duration::from_millis(300));
                assert_eq!(run.await_processes("sleep 6", 2).len(), 2, "they ignore it");
                run.signal(libc::SIGINT);
            }
            let ended = run.end();
            ended.code(130);
            ended.summary(&[
                "ranks 0, 1 had to be killed",
                "stopped by signal 2 (SIGINT)",
            ]);
        }
    });
}

/// A terminal sends Ctrl-C to the whole process group of the launcher.
#[test]
fn ctrl_c_in_a_terminal_reaches_the_launcher_only() {
    both_ways(|way| {
        let run = launch(way, 2, &[], "sleep 72; exit");
        run.await_processes("sleep 72", 2);
        // SAFETY: the call has no pointers.
        let group = |process: i32| unsafe { libc::getpgid(process) };
        let all = run.processes();
        let with_it: Vec<_> = all
            .iter()
            .filter(|(process, _)| group(*process) == group(run.pid()))
            .collect();
        assert_eq!(with_it.len(), 1, "{with_it:?}");
        assert!(
            all.len() >= 6,
            "the launcher, its guard, two shells, what they run: {all:?}"
        );
        run.signal(libc::SIGTERM);
        run.end().code(143);
    });
}

/// The launcher blocks signals, but ranks must not inherit the mask. Uses no shell, because a shell would unblock
/// them.
#[test]
fn no_signal_is_held_in_a_rank() {
    both_ways(|way| {
        let head = [
            "--ranks",
            "1",
            "--engine",
            way.engine(),
            "--program",
            "grep",
        ];
        let tail = ["--", "SigBlk", "/proc/self/status"];
        let ended = launch_with(|_| {}, &[&head[..], &tail].concat()).end();
        ended.code(0);
        assert_eq!(ended.out(), "[rank 0] SigBlk:\t0000000000000000\n");
    });
}
