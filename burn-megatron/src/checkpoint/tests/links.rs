//! Links: removal never follows them. A folder may be a link, but a file of a checkpoint may not.

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use super::*;
use crate::testing::warnings;

/// A folder with content that must not change.
fn victim(at: &Path) -> PathBuf {
    let path = at.join("victim");
    fs::create_dir_all(path.join("deep")).unwrap();
    fs::write(path.join("deep/data"), "precious").unwrap();
    fs::write(path.join("data"), "precious").unwrap();
    path
}

#[track_caller]
fn assert_untouched(victim: &Path) {
    for file in ["data", "deep/data"] {
        assert_eq!(fs::read(victim.join(file)).unwrap(), b"precious", "{file}");
    }
    assert_eq!(disk::names(victim).unwrap(), ["data", "deep"]);
}

fn newest_verified(folder: &CheckpointFolder) -> Result<NewestCheckpoint, CheckpointError> {
    folder.newest_verified(&[], &mut |_, _| {})
}

/// Returns folders with and without a hook. A disk with a hook removes file by file.
fn folders(at: &Path) -> [CheckpointFolder; 2] {
    let hooked = Disk::hooked(|_, _| Ok(()), 40);
    [
        CheckpointFolder::create(at.join("plain")).unwrap(),
        CheckpointFolder::create_on(hooked, at.join("hooked")).unwrap(),
    ]
}

#[test]
fn what_a_killed_save_left_behind_goes_and_links_in_it_are_not_followed() {
    let temp = scratch();
    let victim = victim(temp.path());
    for folder in folders(temp.path()) {
        let path = folder.path();
        symlink(&victim, path.join(".saving-x")).unwrap();
        symlink(&victim, path.join(".removing-step-00000001")).unwrap();
        symlink(victim.join("data"), path.join(".new-latest")).unwrap();
        symlink(temp.path().join("nowhere"), path.join(".new-x")).unwrap();
        fs::create_dir_all(path.join(".saving-y/inside")).unwrap();
        symlink(&victim, path.join(".saving-y/inside/link")).unwrap();
        symlink(victim.join("data"), path.join(".saving-y/part")).unwrap();
        let warned = warnings(|| drop(save(&folder, 1, &Retention::default())));
        assert_untouched(&victim);
        assert_eq!(
            disk::names(path).unwrap(),
            ["latest", "lock", "step-00000001"]
        );
        let wanted = format!(
            "removed the link {}; its target {} was not changed",
            path.join(".saving-x").display(),
            victim.display()
        );
        assert!(warned.contains(&wanted), "{warned:?}");
        assert!(warned.len() >= 4, "{warned:?}");
    }
}

#[test]
fn a_step_that_was_moved_and_linked_back_is_loaded_and_never_emptied() {
    let temp = scratch();
    let disk = temp.path().join("large disk");
    fs::create_dir(&disk).unwrap();
    for (number, folder) in folders(temp.path()).into_iter().enumerate() {
        let (path, moved) = (folder.path(), disk.join(number.to_string()));
        let step = path.join("step-00000001");
        save(&folder, 1, &Retention::default());
        fs::rename(&step, &moved).unwrap();
        symlink(&moved, &step).unwrap();
        assert_small(&folder.latest().unwrap().unwrap());
        assert_small(&newest_verified(&folder).unwrap().checkpoint.unwrap());
        let keep = Retention {
            last: Some(1),
            every: None,
        };
        let warned = warnings(|| drop(save(&folder, 2, &keep)));
        assert_eq!(folder.steps().unwrap(), [2]);
        assert!(warned[0].starts_with(&format!("removed the link {};", step.display())));
        assert_small(&Checkpoint::open(&moved).unwrap());
    }
}

#[test]
fn a_run_and_its_checkpoints_may_lie_behind_links() {
    let temp = scratch();
    let real = temp.path().join("real");
    fs::create_dir_all(real.join("steps")).unwrap();
    symlink(real.join("steps"), real.join("checkpoints")).unwrap();
    let run = temp.path().join("run");
    symlink(&real, &run).unwrap();
    let folder = CheckpointFolder::create(run.join("checkpoints")).unwrap();
    for step in 1..=3 {
        let keep = Retention {
            last: Some(2),
            every: None,
        };
        save(&folder, step, &keep);
    }
    assert_eq!(folder.steps().unwrap(), [2, 3]);
    assert_small(&Checkpoint::open(&run).unwrap());
    assert!(run.is_symlink() && real.join("checkpoints").is_symlink());
    // This simulates a disk that is not mounted.
    fs::remove_dir_all(real.join("steps")).unwrap();
    let text = CheckpointFolder::create(run.join("checkpoints"))
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("checkpoints: it is a link to") && text.contains("is its disk mounted?"),
        "{text}"
    );
}

#[test]
fn a_link_in_the_place_of_a_file_is_refused() {
    let temp = scratch();
    let elsewhere = temp.path().join("elsewhere");
    for name in ["manifest.json", "part-00001.safetensors"] {
        let saved = saved(&temp.path().join("folder"));
        let opened = Checkpoint::open(saved.path()).unwrap();
        let path = saved.path().join(name);
        fs::rename(&path, &elsewhere).unwrap();
        symlink(&elsewhere, &path).unwrap();
        let wanted = format!(
            "cannot open {}: it is a link, and links are not followed here: replace it by the file itself",
            path.display()
        );
        let text = Checkpoint::open(saved.path()).unwrap_err().to_string();
        assert_eq!(text, wanted);
        // A run that resumes stops here, so that no steps are lost.
        let folder = CheckpointFolder::open(temp.path().join("folder")).unwrap();
        assert!(matches!(
            newest_verified(&folder),
            Err(CheckpointError::MayBeIntact { .. })
        ));
        // A link replaces the file after it was opened.
        if name != "manifest.json" {
            let all = TensorSlice::whole(&[3, 4]);
            let text = opened.read("model/a.weight", &all).unwrap_err().to_string();
            assert_eq!(text, wanted);
        }
        // Opening a socket does not block.
        fs::remove_file(&path).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let text = Checkpoint::open(saved.path()).unwrap_err().to_string();
        assert!(text.ends_with("it is not a regular file"), "{text}");
        fs::remove_dir_all(temp.path().join("folder")).unwrap();
    }
}

#[test]
fn a_lock_that_is_a_link_empties_nothing() {
    let temp = scratch();
    let victim = victim(temp.path());
    let folder = CheckpointFolder::create(temp.path().join("folder")).unwrap();
    symlink(victim.join("data"), folder.path().join("lock")).unwrap();
    let text = folder.begin(1).unwrap_err().to_string();
    assert!(text.contains("lock: it is a link"), "{text}");
    assert_untouched(&victim);
}
