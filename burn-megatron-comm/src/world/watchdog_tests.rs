use std::convert::Infallible;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::{Buffer, CommError, ReduceOp, World};
use burn_megatron_test_support::{TIMEOUT, wait_until};

const CHILD: &str = "BURN_MEGATRON_TEST_WATCHDOG";

/// Rank 0 waits for rank 1, which never joins the call.
#[test]
#[ignore = "run as a child process, which the watchdog ends"]
fn as_a_child() {
    let Ok(folder) = std::env::var(CHILD) else {
        return;
    };
    let world = World::threads(2).unwrap();
    let world = world
        .deadline(Duration::from_millis(100))
        .first_deadline(TIMEOUT)
        .grace(Duration::from_millis(100));
    let _ = world
        .call_log_dir(folder)
        .run(|rank| -> Result<Buffer, CommError> {
            let all = rank.communicator();
            all.barrier()?;
            while rank.rank() == 1 {
                thread::sleep(Duration::from_millis(10));
            }
            all.all_reduce(vec![1f32].into(), ReduceOp::Sum)
        });
    unreachable!("the world has failed, and rank 1 has not ended");
}

#[test]
fn a_rank_that_hangs_outside_of_calls_ends_the_process_with_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let name = "world::watchdog::tests::as_a_child";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env(CHILD, folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > TIMEOUT {
            child.kill().unwrap();
            panic!("it hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let output_text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{output_text}");
    for says in [
        "error: rank 0 failed: deadline: after ",
        " s, rank 1 has not joined call 1 all_reduce(sum) of 1 f32",
        "rank 1 is past call 0 barrier",
        "call log: ",
        "still running after 0.1 s: rank 1 is past call 0 barrier over world [0, 1]; a thread cannot be",
    ] {
        assert!(output_text.contains(says), "{says}: {output_text}");
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
}

/// If all ranks end within the grace period, the world returns the failure.
#[test]
fn a_world_that_ends_is_left_alone() {
    let long = Duration::from_secs(3600);
    let world = World::threads(3).unwrap().grace(long);
    assert_eq!(
        world.run(|rank| Ok::<_, Infallible>(rank.rank())).unwrap(),
        [0, 1, 2]
    );
    let error = world.run(|rank| match rank.rank() {
        1 => Err("on purpose"),
        _ => Ok(rank.communicator().barrier().is_err()),
    });
    assert!(
        error
            .unwrap_err()
            .to_string()
            .starts_with("rank 1 failed: on purpose")
    );
}

#[test]
fn the_grace_begins_with_the_first_failure() {
    let ended = |rank, failed| RankEnded { rank, failed };
    let (sender, ends) = mpsc::channel();
    sender.send(ended(1, false)).unwrap();
    let watch = thread::spawn(move || running_after_grace(Duration::from_millis(1), 4, &ends));
    sender.send(ended(3, true)).unwrap();
    assert_eq!(watch.join().unwrap(), Some(vec![0, 2]));
    let (sender, ends) = mpsc::channel();
    (0..4).for_each(|rank| sender.send(ended(rank, rank == 2)).unwrap());
    let watch = thread::spawn(move || running_after_grace(Duration::ZERO, 4, &ends));
    drop(sender);
    wait_until("its end", || watch.is_finished());
    assert_eq!(watch.join().unwrap(), None);
}
