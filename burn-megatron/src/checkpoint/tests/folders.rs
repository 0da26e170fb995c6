//! Folders of checkpoints: which one is the latest, which ones stay, who may write.

use super::*;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

fn names(path: &Path) -> Vec<String> {
    disk::names(path).unwrap()
}

fn keep(last: usize, every: u64) -> Retention {
    Retention {
        last: Some(last),
        every: Some(every),
    }
}

#[test]
fn old_ones_go_after_the_new_one_is_there() {
    let held = scratch();
    let path = held.path();
    let folder = CheckpointFolder::create(path).unwrap();
    assert!(folder.latest().unwrap().is_none());
    for step in 1..=7 {
        let saved = save(&folder, step, &keep(2, 3));
        assert_small(&saved);
        assert_eq!(folder.latest().unwrap().unwrap().about().step, step);
    }
    assert_eq!(folder.steps().unwrap(), [3, 6, 7]);
    let expected = [
        "latest",
        "lock",
        "step-00000003",
        "step-00000006",
        "step-00000007",
    ];
    assert_eq!(names(path), expected);
    let files = [
        "manifest.json",
        "part-00000.safetensors",
        "part-00001.safetensors",
    ];
    assert_eq!(names(&path.join("step-00000007")), files);
}

#[test]
fn a_step_is_saved_again_without_touching_the_first() {
    let held = scratch();
    let path = held.path();
    let folder = CheckpointFolder::create(path).unwrap();
    save(&folder, 5, &Retention::default());
    let again = save(&folder, 5, &Retention::default());
    assert_eq!(again.path(), path.join("step-00000005-2"));
    assert_eq!(names(path), ["latest", "lock", "step-00000005-2"]);
    assert_small(&folder.latest().unwrap().unwrap());
    // What is lower than all others stays, for it is the new one.
    save(&folder, 3, &keep(1, 100));
    assert_eq!(folder.steps().unwrap(), [3, 5]);
    assert_eq!(folder.latest().unwrap().unwrap().about().step, 3);
}

#[test]
fn a_pointer_to_nothing_is_named() {
    let held = scratch();
    let path = held.path();
    let folder = CheckpointFolder::create(path).unwrap();
    let text = Checkpoint::open(path).unwrap_err().to_string();
    assert!(text.ends_with("has no finished checkpoint"), "{text}");
    save(&folder, 1, &Retention::default());
    save(&folder, 2, &Retention::default());
    fs::remove_dir_all(path.join("step-00000002")).unwrap();
    let text = Checkpoint::open(path).unwrap_err().to_string();
    assert!(
        text.contains("latest: it names step-00000002, which is not there"),
        "{text}"
    );
    assert!(text.contains("there are step-00000001"), "{text}");
    for bad in [
        "",
        "step-00000001",
        "../x\n",
        "step-1\n",
        "step-00000001-1\n",
        "ä\n",
    ] {
        fs::write(path.join("latest"), bad).unwrap();
        let text = Checkpoint::open(path).unwrap_err().to_string();
        assert!(text.contains("names no checkpoint"), "{text}");
    }
    fs::write(path.join("latest"), [0xff, 0xfe]).unwrap();
    Checkpoint::open(path).unwrap_err();
    fs::remove_file(path.join("latest")).unwrap();
    let text = Checkpoint::open(path).unwrap_err().to_string();
    assert!(
        text.contains("step-00000001 can be opened by name"),
        "{text}"
    );
    assert_small(&Checkpoint::open(path.join("step-00000001")).unwrap());
    // A save puts it right.
    save(&folder, 3, &Retention::default());
    assert_eq!(Checkpoint::open(path).unwrap().about().step, 3);
}

#[test]
fn the_folder_of_a_run_is_opened_too() {
    let held = scratch();
    let run = held.path();
    saved(&run.join("checkpoints"));
    assert_small(&Checkpoint::open(run).unwrap());
}

#[test]
fn one_run_at_a_time_writes() {
    let held = scratch();
    let path = held.path();
    let first = CheckpointFolder::create(path).unwrap();
    let second = CheckpointFolder::open(path).unwrap();
    let lock = first.lock().unwrap();
    // Clones of the first are the same run.
    let clone = first.clone();
    let same = clone.lock().unwrap();
    let error = second.begin(1).unwrap_err();
    assert!(matches!(error, CheckpointError::Locked { .. }), "{error}");
    let holder = format!("is being written by process {} on ", std::process::id());
    assert!(error.to_string().contains(&holder), "{error}");
    drop(lock);
    second.lock().unwrap_err();
    drop(same);
    let draft = second.begin(1).unwrap();
    first.begin(1).unwrap_err();
    // Who has joined a draft cannot publish it while its owner lives.
    let joined = first.join(draft.name()).unwrap();
    joined
        .publish(0, &about(1), &Retention::default(), WAIT)
        .unwrap_err();
    drop(draft);
    save(&first, 1, &Retention::default());
    second.join("step-00000001").unwrap_err();
    second.join(".saving-../../x").unwrap_err();
}

#[test]
fn a_draft_that_is_dropped_is_gone() {
    let held = scratch();
    let path = held.path();
    let folder = CheckpointFolder::create(path).unwrap();
    let draft = folder.begin(1).unwrap();
    let joined = folder.join(draft.name()).unwrap();
    let (tensors, parts) = small();
    write(&joined, &tensors, &parts);
    drop(joined);
    assert_eq!(names(path).len(), 2);
    drop(draft);
    assert_eq!(names(path), ["lock"]);
    // What a killed save has left goes with the next.
    fs::create_dir_all(path.join(".saving-00000009-x")).unwrap();
    fs::write(path.join(".saving-00000009-x/part"), "half").unwrap();
    fs::create_dir_all(path.join(".removing-step-00000002")).unwrap();
    fs::write(path.join(".new-latest"), "half").unwrap();
    fs::write(path.join("notes.txt"), "mine").unwrap();
    save(&folder, 1, &Retention::default());
    assert_eq!(
        names(path),
        ["latest", "lock", "notes.txt", "step-00000001"]
    );
}

type Log = Arc<Mutex<Vec<(Operation, PathBuf)>>>;

/// A disk that writes down what it does, and fails at the operation of this number.
fn recorded(fail_at: usize, error: io::ErrorKind) -> (Disk, Log) {
    let log = Log::default();
    let own = Arc::clone(&log);
    let hook = move |operation: Operation, path: &Path| {
        let mut log = own.lock().unwrap();
        log.push((operation, path.to_path_buf()));
        match log.len() == fail_at {
            true => Err(error.into()),
            false => Ok(()),
        }
    };
    (Disk::hooked(hook, 40), log)
}

/// All that a file system may do in any order before a name is given is done before.
#[test]
fn bytes_reach_the_disk_before_names() {
    let held = scratch();
    let path = held.path();
    let (disk, log) = recorded(0, io::ErrorKind::Other);
    let folder = CheckpointFolder::create_on(disk, path).unwrap();
    save(&folder, 1, &Retention::default());
    let log = log.lock().unwrap();
    let published = |(operation, path): &(Operation, PathBuf)| {
        let name = path.file_name().unwrap().to_string_lossy();
        *operation == Operation::Rename && name.starts_with(".saving-")
    };
    let at = log.iter().position(published).unwrap();
    let draft = &log[at].1;
    // A sync before the name, and after the last change.
    let is_synced = |path: &Path, sync: Operation, changes: &[Operation], before: usize| {
        let of = |wanted: &dyn Fn(&Operation, &Path) -> bool| {
            log[..before]
                .iter()
                .rposition(|(operation, path)| wanted(operation, path))
        };
        let last_sync = of(&|operation, found| *operation == sync && found == path);
        let changed = of(&|operation, found| {
            let found = if sync == Operation::SyncFolder {
                found.parent()
            } else {
                Some(found)
            };
            changes.contains(operation) && found == Some(path)
        });
        last_sync.is_some() && last_sync > changed
    };
    let written = log[..at]
        .iter()
        .filter(|(operation, _)| *operation == Operation::Write);
    let mut files: Vec<_> = written
        .map(|(_, path)| path)
        .filter(|path| path.starts_with(draft))
        .collect();
    files.dedup();
    // Two parts, what each says of itself, the manifest.
    assert_eq!(files.len(), 5, "{files:?}");
    for file in files {
        assert!(
            is_synced(file, Operation::Sync, &[Operation::Write], at),
            "{file:?}"
        );
    }
    let changes = [Operation::Create, Operation::Rename, Operation::Remove];
    assert!(is_synced(draft, Operation::SyncFolder, &changes, at));
    // The pointer comes after the name has reached the disk, and reaches it itself.
    let pointer = log.iter().position(|(operation, path)| {
        *operation == Operation::Rename && path.ends_with(".new-latest")
    });
    let pointer = pointer.unwrap();
    let between = &log[at..pointer];
    assert!(between.contains(&(Operation::SyncFolder, path.to_path_buf())));
    assert!(is_synced(
        &path.join(".new-latest"),
        Operation::Sync,
        &[Operation::Write],
        pointer
    ));
    assert!(log[pointer..].contains(&(Operation::SyncFolder, path.to_path_buf())));
}

/// One save after another, each failing at the next operation: what was there stays, the error says what
/// could not be done, and the next save works.
#[test]
fn an_error_at_any_operation_loses_nothing() {
    let kinds = [
        io::ErrorKind::StorageFull,
        io::ErrorKind::ReadOnlyFilesystem,
    ];
    for kind in kinds {
        let mut stop = 0;
        loop {
            stop += 1;
            let held = scratch();
            let path = held.path();
            let own = CheckpointFolder::create(path).unwrap();
            save(&own, 1, &Retention::default());
            save(&own, 2, &Retention::default());
            let (disk, log) = recorded(stop, kind);
            let folder = CheckpointFolder::create_on(disk, path).unwrap();
            let (tensors, parts) = small();
            let result = folder.begin(3).and_then(|draft| {
                for (rank, part) in parts.iter().enumerate() {
                    let pieces = part.iter().map(|(tensor, slice)| Piece {
                        tensor: tensors[*tensor].meta.clone(),
                        slice: slice.clone(),
                    });
                    let pieces: Vec<_> = pieces.collect();
                    let data = |index: usize| Ok(tensors[part[index].0].of(&part[index].1));
                    draft.write_part(rank, &pieces, &[], data)?;
                }
                draft.publish(2, &about(3), &keep(1, 100), WAIT)
            });
            let operations = log.lock().unwrap().clone();
            let latest = own.latest().unwrap().unwrap();
            assert_small(&latest);
            for step in own.steps().unwrap() {
                assert_small(&Checkpoint::open(path.join(format!("step-{step:08}"))).unwrap());
            }
            if operations.len() < stop {
                assert_eq!(result.unwrap().about().step, 3);
                assert!(stop > 40, "{stop}");
                break;
            }
            let (operation, at) = &operations[stop - 1];
            let error = result.unwrap_err();
            let name = at.file_name().unwrap().to_string_lossy();
            let text = error.to_string();
            assert!(
                text.contains("cannot ") && text.contains(&*name),
                "{operation:?}: {text}"
            );
            let of_part = matches!(operation, Operation::Write) && name.ends_with(".safetensors");
            assert!(!of_part || text.contains(" B were to be written"), "{text}");
            let leftover = matches!(error, CheckpointError::Leftover { .. });
            let expected = if leftover { 3 } else { 2 };
            // Only the sync of the folder comes after the pointer has moved.
            let moved = operations[..stop].iter().any(|(operation, path)| {
                *operation == Operation::Rename && path.ends_with(".new-latest")
            }) && *operation != Operation::Rename;
            let expected = if moved { 3 } else { expected };
            assert_eq!(latest.about().step, expected, "{operation:?} {text}");
            drop(folder);
            save(&own, 4, &keep(1, 100));
            assert_eq!(names(path), ["latest", "lock", "step-00000004"]);
        }
    }
}
