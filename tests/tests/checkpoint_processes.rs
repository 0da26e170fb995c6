//! Tests of saves by separate processes: killed before each disk operation, on a full disk, and concurrent.
//!
//! The child processes run this test binary. An environment variable contains their task.
#![cfg(unix)]

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointMetadata, Disk, ElementType,
    NewestCheckpoint, PendingCheckpoint, Retention, TensorMeta, TensorShard, TensorSlice,
    TensorSource,
};
use burn_megatron_test_support::skipped;

/// The environment variable that contains the task of a child.
const TASK: &str = "BURN_MEGATRON_CHECKPOINT_TEST";
const WAIT: Duration = Duration::from_secs(60);

/// The number of rows of the only tensor.
const ROWS: usize = 2;

fn tensor(columns: usize) -> TensorMeta {
    TensorMeta {
        key: "model/weight".into(),
        dtype: ElementType::F32,
        shape: vec![ROWS, columns],
    }
}

/// Returns the slice of a rank: one row.
fn row(rank: usize, columns: usize) -> TensorSlice {
    TensorSlice {
        offset: vec![rank, 0],
        shape: vec![1, columns],
    }
}

/// Returns the content of a row in this step.
fn bytes(step: u64, rank: usize, columns: usize) -> Vec<u8> {
    let bytes = (0..columns * 4).map(|at| (at as u64 * 7 + step * 31 + rank as u64) as u8);
    bytes.collect()
}

fn write_part(
    draft: &PendingCheckpoint,
    step: u64,
    rank: usize,
    columns: usize,
) -> Result<(), CheckpointError> {
    let piece = TensorShard {
        tensor: tensor(columns),
        slice: row(rank, columns),
    };
    draft.write_part(rank, &[piece], &[], |_| Ok(bytes(step, rank, columns)))
}

fn publish(
    draft: PendingCheckpoint,
    step: u64,
    last: usize,
    wait: Duration,
) -> Result<Checkpoint, CheckpointError> {
    let about = CheckpointMetadata {
        step,
        samples: step,
        layout: "data 2".into(),
        config: serde_json::Value::Null,
        state: serde_json::Value::Null,
    };
    let keep = Retention {
        last: Some(last),
        every: None,
    };
    draft.publish(ROWS, &about, &keep, wait)
}

fn save(
    folder: &CheckpointFolder,
    step: u64,
    last: usize,
    columns: usize,
) -> Result<Checkpoint, CheckpointError> {
    let draft = folder.begin(step)?;
    for rank in 0..ROWS {
        write_part(&draft, step, rank, columns)?;
    }
    publish(draft, step, last, WAIT)
}

/// Checks every byte of a checkpoint.
fn assert_whole(checkpoint: &Checkpoint, columns: usize) {
    checkpoint.verify(&mut |_| {}).unwrap();
    let step = checkpoint.metadata().step;
    for rank in 0..ROWS {
        let read = checkpoint
            .read("model/weight", &row(rank, columns))
            .unwrap();
        assert_eq!(read, bytes(step, rank, columns), "step {step}, rank {rank}");
    }
}

fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// The task of a child.
enum Task {
    /// Saves step 3, and is killed before the operation with this number.
    DieBefore(usize),
    /// Saves step 3 with this limit on file sizes.
    Limit(u64),
    /// Acquires the lock, reports it, and waits to be killed.
    Hold,
    /// Writes the part of this rank of a draft.
    Part(usize, String),
}

/// Starts a child process.
fn child(path: &Path, task: &Task) -> Child {
    let task = match task {
        Task::DieBefore(operation) => format!("die {operation}"),
        Task::Limit(bytes) => format!("limit {bytes}"),
        Task::Hold => "hold".into(),
        Task::Part(rank, draft) => format!("part {rank} {draft}"),
    };
    Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "checkpoint_processes::as_a_child",
            "--ignored",
            "--nocapture",
        ])
        .env(TASK, format!("{task}\n{}", path.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn end(child: Child) -> (ExitStatus, String) {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status, text)
}

/// The entry point of a child process. It is not a test.
#[test]
#[ignore = "started by the other tests"]
fn as_a_child() {
    let Ok(text) = std::env::var(TASK) else {
        return;
    };
    let (task, path) = text.split_once('\n').unwrap();
    let words: Vec<_> = task.split(' ').collect();
    match words[..] {
        ["die", operation] => {
            let (stop, done) = (operation.parse::<usize>().unwrap(), AtomicUsize::new(0));
            let hook = move |_, _: &Path| {
                if done.fetch_add(1, Ordering::Relaxed) + 1 == stop {
                    die();
                }
                Ok(())
            };
            let folder = CheckpointFolder::create_on(Disk::hooked(hook, 60), path).unwrap();
            save(&folder, 3, 1, 20).unwrap();
        }
        ["limit", bytes] => {
            limit_files(bytes.parse().unwrap());
            let folder = CheckpointFolder::create(path).unwrap();
            println!("error: {}", save(&folder, 3, 2, 5000).unwrap_err());
        }
        ["hold"] => {
            let _lock = CheckpointFolder::create(path).unwrap().lock().unwrap();
            println!("holds");
            thread::sleep(WAIT);
        }
        ["part", rank, draft] => {
            let draft = CheckpointFolder::open(path).unwrap().join(draft).unwrap();
            write_part(&draft, 3, rank.parse().unwrap(), 20).unwrap();
        }
        _ => panic!("{task}"),
    }
}

/// Exits without cleanup, as when a machine is lost.
fn die() -> ! {
    // Safety: both calls take and return plain numbers.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    loop {
        thread::sleep(WAIT);
    }
}

/// Makes writes fail if a file grows beyond this size.
fn limit_files(bytes: u64) {
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: bytes,
    };
    // Safety: the pointer is valid until the call returns. The signal is ignored, so the write fails.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
    }
}

/// Kills a save before each of its operations, in folders with `before` checkpoints, until a save completes.
fn kill_everywhere(before: u64) {
    let mut seen = [false; 2];
    for operation in 1.. {
        let held = tempfile::tempdir().unwrap();
        let path = held.path();
        let folder = CheckpointFolder::create(path).unwrap();
        for step in 1..=before {
            save(&folder, step, 2, 20).unwrap();
        }
        let (status, _) = end(child(path, &Task::DieBefore(operation)));
        let survived = status.success();
        assert!(
            survived || status.signal() == Some(libc::SIGKILL),
            "{status}"
        );
        let latest = folder.latest().unwrap();
        let found = latest.as_ref().map_or(0, |latest| latest.metadata().step);
        assert!(
            found == before || found == 3,
            "operation {operation}: {found}"
        );
        assert!(!survived || found == 3);
        seen[usize::from(found == 3)] = true;
        latest.iter().for_each(|latest| assert_whole(latest, 20));
        // Every folder with the name of a checkpoint is complete, and the latest checkpoint is found.
        let published = names(path).into_iter();
        let published: Vec<_> = published.filter(|name| name.starts_with("step-")).collect();
        for name in &published {
            assert_whole(&Checkpoint::open(path.join(name)).unwrap(), 20);
        }
        let NewestCheckpoint {
            checkpoint,
            skipped: passed,
        } = folder.newest_verified(&[], &mut |_, _| {}).unwrap();
        let newest = checkpoint.map(|newest| format!("step-{:08}", newest.metadata().step));
        assert_eq!(newest.as_ref(), published.last());
        assert!(passed.is_empty(), "{passed:?}");
        // The remains of the killed save do not prevent a new save.
        assert_whole(&save(&folder, 4, 1, 20).unwrap(), 20);
        assert_eq!(names(path), ["latest", "lock", "step-00000004"]);
        if survived {
            assert!(operation > 40 && seen == [true; 2], "{operation}");
            return;
        }
    }
}

#[test]
fn a_save_that_is_killed_anywhere_loses_nothing() {
    kill_everywhere(2);
}

#[test]
fn a_first_save_that_is_killed_anywhere_leaves_nothing() {
    kill_everywhere(0);
}

#[test]
fn a_file_that_cannot_grow_is_named() {
    let held = tempfile::tempdir().unwrap();
    let path = held.path();
    let folder = CheckpointFolder::create(path).unwrap();
    save(&folder, 2, 2, 5000).unwrap();
    let (status, text) = end(child(path, &Task::Limit(8000)));
    assert!(status.success(), "{text}");
    let needed = "19.72 KiB were to be written";
    assert!(
        text.contains("cannot write") && text.contains("part-00000") && text.contains(needed),
        "{text}"
    );
    assert_eq!(names(path), ["latest", "lock", "step-00000002"]);
    assert_whole(&folder.latest().unwrap().unwrap(), 5000);
}

/// Uses a separate small file system, if the user may mount one.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_named_and_freed() {
    let held = tempfile::tempdir().unwrap();
    let path = held.path();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=128k", "none"])
        .arg(path)
        .stderr(Stdio::null())
        .status();
    match mounted {
        Ok(status) if status.success() => {}
        _ => return skipped("only root can mount a small disk"),
    }
    let result = std::panic::catch_unwind(|| {
        let folder = CheckpointFolder::create(path.join("checkpoints")).unwrap();
        save(&folder, 1, 1, 5000).unwrap();
        let error = save(&folder, 2, 1, 20_000).unwrap_err();
        let CheckpointError::Write { source, total, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(source.kind(), ErrorKind::StorageFull);
        assert!(
            *total > 80_000 && error.to_string().contains("KiB were to be written"),
            "{error}"
        );
        assert_whole(&folder.latest().unwrap().unwrap(), 5000);
        // The space of the failed save is free again.
        assert_whole(&save(&folder, 3, 1, 5000).unwrap(), 5000);
    });
    let _ = Command::new("umount").arg(path).status();
    result.unwrap();
}

#[test]
fn a_second_run_is_refused_until_the_first_is_gone() {
    let held = tempfile::tempdir().unwrap();
    let path = held.path();
    let mut holder = child(path, &Task::Hold);
    let output = BufReader::new(holder.stdout.take().unwrap());
    let holds = output
        .lines()
        .map_while(Result::ok)
        .any(|line| line.contains("holds"));
    assert!(holds);
    let folder = CheckpointFolder::open(path).unwrap();
    let error = save(&folder, 1, 1, 20).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, CheckpointError::Locked { .. }), "{text}");
    assert!(
        text.contains(&format!("process {} on ", holder.id())),
        "{text}"
    );
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert_whole(&save(&folder, 1, 1, 20).unwrap(), 20);
}

#[test]
fn processes_write_their_parts() {
    let held = tempfile::tempdir().unwrap();
    let path = held.path();
    let folder = CheckpointFolder::create(path).unwrap();
    let draft = folder.begin(3).unwrap();
    let part =
        |draft: &PendingCheckpoint, rank| child(path, &Task::Part(rank, draft.name().into()));
    let children = [part(&draft, 0), part(&draft, 1)];
    assert_whole(&publish(draft, 3, 1, WAIT).unwrap(), 20);
    children
        .into_iter()
        .for_each(|child| assert!(end(child).0.success()));
    // The part of the second rank is never written.
    let draft = folder.begin(4).unwrap();
    assert!(end(part(&draft, 0)).0.success());
    let error = publish(draft, 4, 1, Duration::from_millis(50)).unwrap_err();
    assert!(error.to_string().contains("from rank 1 after"), "{error}");
    assert_eq!(names(path), ["latest", "lock", "step-00000003"]);
}
