//! Checkpoints that cannot be used: corrupt checkpoints, checkpoints that may be intact, and a check that none
//! is lost.

use super::*;

fn names(path: &Path) -> Vec<String> {
    disk::names(path).unwrap()
}

fn newest(folder: &CheckpointFolder, skip: &[u64]) -> Result<NewestCheckpoint, CheckpointError> {
    folder.newest_verified(skip, &mut |_, _| {})
}

/// Changes the last byte of a data file.
fn break_part(step: &Path) {
    let file = step.join("part-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
}

/// Changes a manifest to a later version of the format.
fn of_version_2(step: &Path) {
    let manifest = step.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let newer = text.replace("\"version\": 1,", "\"version\": 2,");
    let (body, _) = newer.rsplit_once("\"checksum\": \"").unwrap();
    fs::write(manifest, checksummed::append_checksum(body.to_string())).unwrap();
}

#[test]
fn going_back_discards_what_came_later_once_a_new_one_is_there() {
    let temp = scratch();
    let path = temp.path();
    let folder = CheckpointFolder::create(path).unwrap();
    for step in 1..=4 {
        save(&folder, step, &Retention::default());
    }
    assert!(folder.discard_after(4).unwrap().is_empty());
    assert_eq!(folder.discard_after(2).unwrap(), [3, 4]);
    assert_eq!(folder.latest().unwrap().unwrap().metadata().step, 2);
    assert_eq!(folder.steps().unwrap(), [1, 2]);
    // They stay until the next save is published, even after a failed save.
    drop(folder.begin(3).unwrap());
    let inactive = folder.inactive().unwrap();
    let inactive_names: Vec<_> = inactive.iter().map(InactiveCheckpoint::name).collect();
    assert_eq!(
        inactive_names,
        ["step-00000003.discarded", "step-00000004.discarded"]
    );
    assert!(inactive.iter().all(|inactive| inactive.is_discarded));
    assert_small(&Checkpoint::open(&inactive[1].path).unwrap());
    // Again, before the next save.
    folder.discard_after(1).unwrap();
    save(&folder, 2, &Retention::default());
    assert_eq!(
        names(path),
        ["latest", "lock", "step-00000001", "step-00000002"]
    );
    folder.discard_after(0).unwrap();
    assert!(folder.latest().unwrap().is_none());
}

#[test]
fn the_newest_whole_one_is_found_and_what_is_corrupt_is_quarantined() {
    let temp = scratch();
    let path = temp.path();
    let folder = CheckpointFolder::create(path).unwrap();
    assert!(newest(&folder, &[]).unwrap().checkpoint.is_none());
    for step in 1..=4 {
        save(&folder, step, &Retention::default());
    }
    fs::remove_file(path.join("step-00000004/manifest.json")).unwrap();
    break_part(&path.join("step-00000003"));
    let mut read = 0;
    let found = folder.newest_verified(&[], &mut |_, bytes| read += bytes);
    let NewestCheckpoint {
        checkpoint,
        skipped,
    } = found.unwrap();
    let whole = checkpoint.unwrap();
    assert_eq!(whole.metadata().step, 2);
    assert_eq!(read, 2 * whole.totals().bytes);
    let reasons: Vec<_> = skipped.iter().map(|one| one.error.to_string()).collect();
    assert!(
        reasons[0].contains("step-00000004/manifest.json"),
        "{reasons:?}"
    );
    assert!(
        reasons[1].contains("chunk 1 of 1 of object/rank 1"),
        "{reasons:?}"
    );
    // The manifests alone reveal fewer faults.
    let complete = folder.newest_complete(&[]).unwrap();
    assert_eq!(complete.checkpoint.unwrap().metadata().step, 3);

    folder.quarantine(&skipped).unwrap();
    assert_eq!(folder.latest().unwrap().unwrap().metadata().step, 2);
    // The same steps are saved and broken again: quarantined checkpoints are neither counted nor removed.
    save(&folder, 3, &Retention::default());
    break_part(&path.join("step-00000003"));
    let skipped = newest(&folder, &[]).unwrap().skipped;
    folder.quarantine(&skipped).unwrap();
    let one = Retention {
        last: Some(1),
        every: None,
    };
    save(&folder, 5, &one);
    let expected = [
        "latest",
        "lock",
        "step-00000003.unreadable-corrupt",
        "step-00000003.unreadable-corrupt-2",
        "step-00000004.unreadable-corrupt",
        "step-00000005",
    ];
    assert_eq!(names(path), expected);
    let inactive = folder.inactive().unwrap();
    assert_eq!(inactive.len(), 3);
    assert!(inactive.iter().all(|inactive| !inactive.is_discarded));
    let bytes = inactive.iter().map(|inactive| inactive.bytes.unwrap());
    let files = inactive.iter().flat_map(|inactive| names(&inactive.path));
    assert!(bytes.sum::<u64>() > 0 && files.count() == 8);
}

/// Another version, a dangling link, the empty mount point of a disk, and a manifest that is a link, which is
/// not followed.
#[cfg(unix)]
#[test]
fn what_may_be_whole_stops_the_search_unless_it_is_skipped() {
    let unmounted = |step: &Path| {
        fs::rename(step, step.with_file_name("elsewhere")).unwrap();
        std::os::unix::fs::symlink(step.with_file_name("gone"), step).unwrap();
    };
    let empty = |step: &Path| {
        fs::rename(step, step.with_file_name("elsewhere")).unwrap();
        fs::create_dir(step).unwrap();
    };
    let linked = |step: &Path| {
        let manifest = step.join("manifest.json");
        fs::rename(&manifest, step.join("moved.json")).unwrap();
        std::os::unix::fs::symlink("moved.json", manifest).unwrap();
    };
    type Damage<'a> = &'a dyn Fn(&Path);
    let cases: [(Damage, &str, &str); 4] = [
        (&of_version_2, "version", "version 2 of the format"),
        (&unmounted, "io", "cannot list"),
        (&empty, "io", "as if its disk were not mounted"),
        (&linked, "io", "it is a link"),
    ];
    for (damage, word, wanted) in cases {
        let temp = scratch();
        let path = temp.path();
        let folder = CheckpointFolder::create(path).unwrap();
        for step in 1..=2 {
            save(&folder, step, &Retention::default());
        }
        damage(&path.join("step-00000002"));
        for skip in [&[][..], &[1]] {
            let error = newest(&folder, skip).unwrap_err();
            assert!(
                matches!(error, CheckpointError::MayBeIntact { step: 2, .. }),
                "{error}"
            );
            assert!(error.to_string().contains(wanted), "{error}");
        }
        let NewestCheckpoint {
            checkpoint,
            skipped,
        } = newest(&folder, &[2]).unwrap();
        assert_eq!(checkpoint.unwrap().metadata().step, 1);
        folder.quarantine(&skipped).unwrap();
        let inactive = format!("step-00000002.unreadable-{word}");
        assert_eq!(folder.inactive().unwrap()[0].name(), inactive);
        assert_eq!(folder.latest().unwrap().unwrap().metadata().step, 1);
        // An intact checkpoint is used even if its step is in `skip`.
        save(&folder, 2, &Retention::default());
        let found = newest(&folder, &[2]).unwrap().checkpoint;
        assert_eq!(found.unwrap().metadata().step, 2);
    }
}
