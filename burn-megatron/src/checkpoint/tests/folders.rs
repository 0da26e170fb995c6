//! Folders of checkpoints: `latest`, retention and the lock.

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
    let temp = scratch();
    let path = temp.path();
    let folder = CheckpointFolder::create(path).unwrap();
    assert!(folder.latest().unwrap().is_none());
    for step in 1..=7 {
        let saved = save(&folder, step, &keep(2, 3));
        assert_small(&saved);
        assert_eq!(folder.latest().unwrap().unwrap().metadata().step, step);
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
    let temp = scratch();
    let path = temp.path();
    let folder = CheckpointFolder::create(path).unwrap();
    save(&folder, 5, &Retention::default());
    let again = save(&folder, 5, &Retention::default());
    assert_eq!(again.path(), path.join("step-00000005-2"));
    assert_eq!(names(path), ["latest", "lock", "step-00000005-2"]);
    assert_small(&folder.latest().unwrap().unwrap());
    // The new one is kept, although its step is the lowest.
    save(&folder, 3, &keep(1, 100));
    assert_eq!(folder.steps().unwrap(), [3, 5]);
    assert_eq!(folder.latest().unwrap().unwrap().metadata().step, 3);
}

#[test]
fn a_pointer_to_nothing_is_named() {
    let temp = scratch();
    let path = temp.path();
    let folder = CheckpointFolder::create(path).unwrap();
    let text = Checkpoint::open(path).unwrap_err().to_string();
    assert!(text.ends_with("has no finished checkpoint"), "{text}");
    save(&folder, 1, &Retention::default());
    save(&folder, 2, &Retention::default());
    fs::remove_dir_all(path.join("step-00000002")).unwrap();
    let text = Checkpoint::open(path).unwrap_err().to_string();
    assert!(
        text.contains("latest: it names step-00000002, which does not exist"),
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
    // The next save repairs it.
    save(&folder, 3, &Retention::default());
    assert_eq!(Checkpoint::open(path).unwrap().metadata().step, 3);
}

#[test]
fn the_folder_of_a_run_is_opened_too() {
    let temp = scratch();
    let run = temp.path();
    saved(&run.join("checkpoints"));
    assert_small(&Checkpoint::open(run).unwrap());
}

#[test]
fn one_run_at_a_time_writes() {
    let temp = scratch();
    let path = temp.path();
    let first = CheckpointFolder::create(path).unwrap();
    let second = CheckpointFolder::open(path).unwrap();
    let lock = first.lock().unwrap();
    // Clones share the lock.
    let clone = first.clone();
    let same = clone.lock().unwrap();
    let error = second.begin(1).unwrap_err();
    assert!(matches!(error, CheckpointError::Locked { .. }), "{error}");
    let holder = format!("is being written by process {} on ", std::process::id());
    assert!(error.to_string().contains(&holder), "{error}");
    drop(lock);
    second.lock().unwrap_err();
    drop(same);
    let pending = second.begin(1).unwrap();
    first.begin(1).unwrap_err();
    // A rank that joined cannot publish while the owner holds the lock.
    let joined = first.join(pending.name()).unwrap();
    joined
        .publish(0, &metadata(1), &Retention::default(), WAIT)
        .unwrap_err();
    drop(pending);
    save(&first, 1, &Retention::default());
    second.join("step-00000001").unwrap_err();
    second.join(".saving-../../x").unwrap_err();
}

#[test]
fn a_pending_checkpoint_that_is_dropped_is_gone() {
    let temp = scratch();
    let path = temp.path();
    let folder = CheckpointFolder::create(path).unwrap();
    let pending = folder.begin(1).unwrap();
    let joined = folder.join(pending.name()).unwrap();
    let (tensors, parts) = small();
    write(&joined, &tensors, &parts);
    drop(joined);
    assert_eq!(names(path).len(), 2);
    drop(pending);
    assert_eq!(names(path), ["lock"]);
    // The next save removes the remains of a killed save.
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

type Log = Arc<Mutex<Vec<(DiskOperation, PathBuf)>>>;

/// Returns a disk that records its operations and fails the operation with this number.
fn recorded(fail_at: usize, error: io::ErrorKind) -> (Disk, Log) {
    let log = Log::default();
    let own = Arc::clone(&log);
    let hook = move |operation: DiskOperation, path: &Path| {
        let mut log = own.lock().unwrap();
        log.push((operation, path.to_path_buf()));
        if log.len() == fail_at {
            Err(error.into())
        } else {
            Ok(())
        }
    };
    (Disk::hooked(hook, 40), log)
}

/// Before the rename, all data is synced that a file system could otherwise write after the rename.
#[test]
fn bytes_reach_the_disk_before_names() {
    let temp = scratch();
    let path = temp.path();
    let (disk, log) = recorded(0, io::ErrorKind::Other);
    let folder = CheckpointFolder::create_on(disk, path).unwrap();
    save(&folder, 1, &Retention::default());
    let log = log.lock().unwrap();
    let published = |(operation, path): &(DiskOperation, PathBuf)| {
        let name = path.file_name().unwrap().to_string_lossy();
        *operation == DiskOperation::Rename && name.starts_with(".saving-")
    };
    let at = log.iter().position(published).unwrap();
    let pending = &log[at].1;
    // The file is synced before the rename, and after the last change.
    let is_synced = |path: &Path, sync: DiskOperation, changes: &[DiskOperation], before: usize| {
        let of = |wanted: &dyn Fn(&DiskOperation, &Path) -> bool| {
            log[..before]
                .iter()
                .rposition(|(operation, path)| wanted(operation, path))
        };
        let last_sync = of(&|operation, found| *operation == sync && found == path);
        let changed = of(&|operation, found| {
            let found = if sync == DiskOperation::SyncFolder {
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
        .filter(|(operation, _)| *operation == DiskOperation::Write);
    let mut files: Vec<_> = written
        .map(|(_, path)| path)
        .filter(|path| path.starts_with(pending))
        .collect();
    files.dedup();
    // Two data files, two part manifests, the manifest.
    assert_eq!(files.len(), 5, "{files:?}");
    for file in files {
        assert!(
            is_synced(file, DiskOperation::Sync, &[DiskOperation::Write], at),
            "{file:?}"
        );
    }
    let changes = [
        DiskOperation::Create,
        DiskOperation::Rename,
        DiskOperation::Remove,
    ];
    assert!(is_synced(pending, DiskOperation::SyncFolder, &changes, at));
    // The file `latest` changes after the name of the folder is durable, and is synced as well.
    let pointer = log
        .iter()
        .position(|(operation, path)| {
            *operation == DiskOperation::Rename && path.ends_with(".new-latest")
        })
        .unwrap();
    let between = &log[at..pointer];
    assert!(between.contains(&(DiskOperation::SyncFolder, path.to_path_buf())));
    assert!(is_synced(
        &path.join(".new-latest"),
        DiskOperation::Sync,
        &[DiskOperation::Write],
        pointer
    ));
    assert!(log[pointer..].contains(&(DiskOperation::SyncFolder, path.to_path_buf())));
}

/// The publisher may rename the folder as soon as it finds a part manifest, while the rank that wrote it is
/// still in its call.
#[test]
fn a_part_is_written_by_its_last_operation() {
    for has_data in [true, false] {
        let temp = scratch();
        let path = temp.path().to_path_buf();
        let publish = move |_, _: &Path| {
            for name in names(&path) {
                let pending = path.join(&name);
                let is_visible = pending.join("part-00001.json").exists();
                if name.starts_with(".saving-") && is_visible {
                    std::fs::rename(&pending, path.join("published"))?;
                }
            }
            Ok(())
        };
        let disk = Disk::hooked(publish, 40);
        let folder = CheckpointFolder::create_on(disk, temp.path()).unwrap();
        let pending = folder.begin(1).unwrap();
        let object = ("state".to_string(), vec![1; 5]);
        let objects = if has_data { vec![object] } else { vec![] };
        let written = pending.write_part(1, &[], &objects, |_| Ok(vec![]));
        written.unwrap();
        assert!(!temp.path().join("published").exists());
    }
}

/// Fails the saves at each operation, one save per operation. Earlier checkpoints stay, the error names the
/// operation, and the next save succeeds.
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
            let temp = scratch();
            let path = temp.path();
            let own = CheckpointFolder::create(path).unwrap();
            save(&own, 1, &Retention::default());
            save(&own, 2, &Retention::default());
            let (disk, log) = recorded(stop, kind);
            let folder = CheckpointFolder::create_on(disk, path).unwrap();
            let (tensors, parts) = small();
            let result = folder.begin(3).and_then(|pending| {
                for (rank, part) in parts.iter().enumerate() {
                    let shards: Vec<_> = part
                        .iter()
                        .map(|(tensor, slice)| TensorShard {
                            tensor: tensors[*tensor].meta.clone(),
                            slice: slice.clone(),
                        })
                        .collect();
                    let data = |index: usize| Ok(tensors[part[index].0].of(&part[index].1));
                    pending.write_part(rank, &shards, &[], data)?;
                }
                pending.publish(2, &metadata(3), &keep(1, 100), WAIT)
            });
            let operations = log.lock().unwrap().clone();
            let latest = own.latest().unwrap().unwrap();
            assert_small(&latest);
            for step in own.steps().unwrap() {
                assert_small(&Checkpoint::open(path.join(format!("step-{step:08}"))).unwrap());
            }
            if operations.len() < stop {
                assert_eq!(result.unwrap().metadata().step, 3);
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
            let of_part =
                matches!(operation, DiskOperation::Write) && name.ends_with(".safetensors");
            assert!(!of_part || text.contains(" B were to be written"), "{text}");
            let leftover = matches!(error, CheckpointError::Leftover { .. });
            let expected = if leftover { 3 } else { 2 };
            // After the pointer has moved, only the folder is synced.
            let moved = operations[..stop].iter().any(|(operation, path)| {
                *operation == DiskOperation::Rename && path.ends_with(".new-latest")
            }) && *operation != DiskOperation::Rename;
            let expected = if moved { 3 } else { expected };
            assert_eq!(latest.metadata().step, expected, "{operation:?} {text}");
            drop(folder);
            save(&own, 4, &keep(1, 100));
            assert_eq!(names(path), ["latest", "lock", "step-00000004"]);
        }
    }
}
