//! What a run cannot use: what of it is corrupt and what may be whole, and that nothing of it is lost.

use super::*;

fn names(path: &Path) -> Vec<String> {
    disk::names(path).unwrap()
}

fn newest(folder: &CheckpointFolder, skip: &[u64]) -> Result<Newest, CheckpointError> {
    folder.newest_whole(skip, &mut |_, _| {})
}

/// Changes the last byte of a part.
fn break_part(step: &Path) {
    let file = step.join("part-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
}

/// Makes a checkpoint one of a later version of the format.
fn of_version_2(step: &Path) {
    let manifest = step.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let newer = text.replace("\"version\": 1,", "\"version\": 2,");
    let (body, _) = newer.rsplit_once("\"checksum\": \"").unwrap();
    fs::write(manifest, sealed::seal(body.to_string())).unwrap();
}

#[test]
fn going_back_discards_what_came_later_once_a_new_one_is_there() {
    let held = scratch();
    let path = held.path();
    let folder = CheckpointFolder::create(path).unwrap();
    for step in 1..=4 {
        save(&folder, step, &Retention::default());
    }
    assert!(folder.discard_after(4).unwrap().is_empty());
    assert_eq!(folder.discard_after(2).unwrap(), [3, 4]);
    assert_eq!(folder.latest().unwrap().unwrap().about().step, 2);
    assert_eq!(folder.steps().unwrap(), [1, 2]);
    // They are as they were until the next save is published, one that failed in between included.
    drop(folder.begin(3).unwrap());
    let aside = folder.aside().unwrap();
    let aside_names: Vec<_> = aside.iter().map(Aside::name).collect();
    assert_eq!(
        aside_names,
        ["step-00000003.discarded", "step-00000004.discarded"]
    );
    assert!(aside.iter().all(|aside| aside.is_discarded));
    assert_small(&Checkpoint::open(&aside[1].path).unwrap());
    // Once more, before there was a save.
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
fn the_newest_whole_one_is_found_and_what_is_corrupt_is_set_aside() {
    let held = scratch();
    let path = held.path();
    let folder = CheckpointFolder::create(path).unwrap();
    assert!(newest(&folder, &[]).unwrap().checkpoint.is_none());
    for step in 1..=4 {
        save(&folder, step, &Retention::default());
    }
    fs::remove_file(path.join("step-00000004/manifest.json")).unwrap();
    break_part(&path.join("step-00000003"));
    let mut read = 0;
    let found = folder.newest_whole(&[], &mut |_, bytes| read += bytes);
    let Newest { checkpoint, passed } = found.unwrap();
    let whole = checkpoint.unwrap();
    assert_eq!(whole.about().step, 2);
    assert_eq!(read, 2 * whole.totals().bytes);
    let reasons: Vec<_> = passed.iter().map(|one| one.error.to_string()).collect();
    assert!(
        reasons[0].contains("step-00000004/manifest.json"),
        "{reasons:?}"
    );
    assert!(
        reasons[1].contains("chunk 1 of 1 of object/rank 1"),
        "{reasons:?}"
    );
    // The manifests alone say less.
    let complete = folder.newest_complete(&[]).unwrap();
    assert_eq!(complete.checkpoint.unwrap().about().step, 3);

    folder.set_aside(&passed).unwrap();
    assert_eq!(folder.latest().unwrap().unwrap().about().step, 2);
    // The same steps again, broken again; then nothing of it is counted or goes.
    save(&folder, 3, &Retention::default());
    break_part(&path.join("step-00000003"));
    let passed = newest(&folder, &[]).unwrap().passed;
    folder.set_aside(&passed).unwrap();
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
    let aside = folder.aside().unwrap();
    assert_eq!(aside.len(), 3);
    assert!(aside.iter().all(|aside| !aside.is_discarded));
    let bytes = aside.iter().map(|aside| aside.bytes.unwrap());
    let files = aside.iter().flat_map(|aside| names(&aside.path));
    assert!(bytes.sum::<u64>() > 0 && files.count() == 8);
}

/// Another version, a link to a disk that is not there, the folder of a disk that is not mounted, and a file
/// that is a link, which is not followed.
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
    type Spoil<'a> = &'a dyn Fn(&Path);
    let cases: [(Spoil, &str, &str); 4] = [
        (&of_version_2, "version", "version 2 of the format"),
        (&unmounted, "io", "cannot list"),
        (&empty, "io", "as where a disk is not mounted"),
        (&linked, "io", "it is a link"),
    ];
    for (spoil, word, says) in cases {
        let held = scratch();
        let path = held.path();
        let folder = CheckpointFolder::create(path).unwrap();
        for step in 1..=2 {
            save(&folder, step, &Retention::default());
        }
        spoil(&path.join("step-00000002"));
        for skip in [&[][..], &[1]] {
            let error = newest(&folder, skip).unwrap_err();
            assert!(
                matches!(error, CheckpointError::MayBeWhole { step: 2, .. }),
                "{error}"
            );
            assert!(error.to_string().contains(says), "{error}");
        }
        let Newest { checkpoint, passed } = newest(&folder, &[2]).unwrap();
        assert_eq!(checkpoint.unwrap().about().step, 1);
        folder.set_aside(&passed).unwrap();
        let aside = format!("step-00000002.unreadable-{word}");
        assert_eq!(folder.aside().unwrap()[0].name(), aside);
        assert_eq!(folder.latest().unwrap().unwrap().about().step, 1);
        // A skip is no reason to pass over what is whole.
        save(&folder, 2, &Retention::default());
        let found = newest(&folder, &[2]).unwrap().checkpoint;
        assert_eq!(found.unwrap().about().step, 2);
    }
}
