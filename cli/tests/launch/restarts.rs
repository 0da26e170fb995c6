//! Tests restarts of jobs: new worlds, the number of restarts, and failures without a restart.

use std::collections::BTreeSet;
use std::fs;

use super::run::{Run, Way, both_ways, launch, until};

/// Returns the flags for this number of restarts.
fn restarts(count: &str) -> Vec<&str> {
    vec!["--max-restarts", count, "--restart-delay", "0.1"]
}

/// Checks that each world has its own token and id, and starts after all processes of the previous world have ended.
#[test]
fn a_job_that_a_signal_ended_is_started_again() {
    both_ways(|way| {
        let child = tempfile::NamedTempFile::new().unwrap();
        let child = child.path().display();
        let script = format!(
            "echo world $BURN_MEGATRON_RESTART_COUNT $BURN_MEGATRON_JOB_ID $BURN_MEGATRON_TOKEN
            case $BURN_MEGATRON_RESTART_COUNT$R in
                01) sleep 81 & echo $! > {child}; kill -9 $$ ;;
                1*) kill -0 $(cat {child}) 2> /dev/null && echo left ;;
            esac
            exit 0"
        );
        let ended = launch(way, 2, &restarts("2"), &script).end();
        ended.code(0);
        assert!(!ended.out().contains("left"), "{}", ended.out());
        let world = |number: &str| {
            let start = format!("world {number} ");
            let lines = ended.out().lines();
            let worlds = lines.filter_map(|line| line.split_once(&start).map(|(_, world)| world));
            let worlds: BTreeSet<_> = worlds.collect();
            assert_eq!(worlds.len(), 1, "{}", ended.out());
            worlds.into_iter().next().unwrap().to_owned()
        };
        let words = |world: String| world.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let [first, second] = ["0", "1"].map(|number| words(world(number)));
        assert_ne!(first[1], second[1], "the tokens");
        let id = first[0].strip_suffix(".0").unwrap();
        assert_eq!(second[0], format!("{id}.1"));
        for line in [
            "rank 1 ended by signal 9 (SIGKILL) after ",
            "a process was ended by a signal, which may be transient\n",
            "restart 1 of 2 in 0.1 s\n",
        ] {
            assert!(ended.err.contains(line), "{line}: {}", ended.err);
        }
        let last = ended.err.lines().last().unwrap();
        assert!(
            last.starts_with("1 ") && last.ends_with("complete"),
            "{last}"
        );
    });
}

#[test]
fn what_would_occur_again_is_not_started_again() {
    for (script, code, why) in [
        ("exit 1", 1, "an error of a rank, which would occur again"),
        ("exit 2", 2, "wrong usage, which would fail again"),
        ("exit 130", 130, "interrupted"),
    ] {
        let ended = launch(Way::Own, 1, &restarts("3"), script).end();
        ended.code(code);
        ended.summary(&[&format!("not restarted: {why}")]);
        assert!(!ended.err.contains("restart 1"), "{}", ended.err);
    }
    let ended = launch(Way::Own, 1, &restarts("2"), "kill -11 $$").end();
    ended.code(139);
    let why = "not restarted: the 2 restarts of --max-restarts are used up\n";
    assert!(ended.err.contains(why), "{}", ended.err);
    assert_eq!(
        ended.err.matches("ended by signal 11").count(),
        3 + 3,
        "{}",
        ended.err
    );
}

#[test]
fn ctrl_c_ends_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let began = folder.path().join("began");
    let script = format!(
        "trap 'exit 0' TERM; touch {}; while :; do sleep 0.05; done",
        began.display()
    );
    let run = launch(Way::Own, 1, &restarts("3"), &script);
    until(|| began.exists());
    run.signal(libc::SIGINT);
    let ended = run.end();
    ended.code(130);
    ended.summary(&["stopped by signal 2 (SIGINT)", "not restarted: interrupted"]);

    // Send the signal between two worlds.
    fs::remove_file(&began).unwrap();
    let script = format!("touch {}; kill -9 $$", began.display());
    let flags = ["--max-restarts", "3", "--restart-delay", "60"];
    let run = launch(Way::Own, 1, &flags, &script);
    until(|| began.exists());
    until(|| has_no_guard(&run));
    run.signal(libc::SIGTERM);
    let ended = run.end();
    ended.code(143);
    ended.summary(&["stopped by signal 15 (SIGTERM)"]);
    let said = "interrupted: no restart follows";
    assert!(ended.err.contains(said), "{}", ended.err);
}

/// Returns whether the guard has ended, which shows that its world has ended.
fn has_no_guard(run: &Run) -> bool {
    let mut processes = run.processes().into_iter();
    !processes.any(|(_, called)| called.starts_with("/bin/sh"))
}
