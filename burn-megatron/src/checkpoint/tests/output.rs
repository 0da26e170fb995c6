//! Output paths that are not allowed.

use std::os::unix::fs::symlink;

use super::*;

#[track_caller]
fn refused(to: &Path, read: &[&Path], says: &str) {
    let error = check_output(to, read).unwrap_err().to_string();
    assert!(error.contains(says), "{error}");
}

#[test]
fn an_output_is_neither_in_a_checkpoint_nor_in_what_is_read() {
    let temp = scratch();
    let at = |name: &str| temp.path().join(name);
    let step = saved(&at("run/checkpoints")).path().to_path_buf();
    symlink(at("run/checkpoints"), at("link")).unwrap();
    fs::create_dir(at("model")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    let model = at("model");
    for to in ["run/out", "out", "model/../out", "models", "dangling"] {
        check_output(&at(to), &[&step, &model]).unwrap();
    }
    refused(&step, &[], "it is a checkpoint");
    for to in [
        "link/step-00000007",
        "model/../run/checkpoints/step-00000007",
    ] {
        refused(&at(to), &[], "it is a checkpoint");
        refused(&at(to).join("a/../b"), &[], "inside the checkpoint");
    }
    for to in [
        "run/checkpoints/new",
        "link/new",
        "run/checkpoints/step-00000009",
    ] {
        refused(&at(to), &[], "inside the folder of checkpoints");
    }
    refused(&model, &[&model], "it is");
    refused(&at("link/../../model/a/b"), &[&model], "it is inside");
    refused(temp.path(), &[&model], "it contains");
    // A folder with a manifest of another program is not a checkpoint.
    fs::write(model.join("manifest.json"), "{}").unwrap();
    check_output(&model.join("out"), &[]).unwrap();
}

#[test]
fn an_output_is_not_in_a_running_run() {
    let temp = scratch();
    let at = |name: &str| temp.path().join(name);
    saved(&at("run/checkpoints"));
    let folder = CheckpointFolder::open(at("run/checkpoints")).unwrap();
    let lock = folder.lock().unwrap();
    for to in ["run", "run/new", "run/checkpoints"] {
        refused(&at(to), &[], "is being written by process");
    }
    check_output(&at("other"), &[]).unwrap();
    drop(lock);
    check_output(&at("run/new"), &[]).unwrap();
}
