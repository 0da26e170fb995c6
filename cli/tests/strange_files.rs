//! Tests commands that find a pipe, a folder or a pointer in place of a file.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const FIXTURE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../models/tests/fixtures/hf/llama2"
);

/// Function that creates an object at a path.
type Make = fn(&Path);

/// Runs a command that must fail within a time limit, and returns its error.
fn error(words: &[&str], at: &Path) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.args(words).current_dir(at).stderr(Stdio::piped());
    let mut child = command.stdin(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("{words:?} does not end");
        }
        sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{words:?}: {error}");
    error
}

#[test]
fn a_pipe_a_folder_or_a_pointer_in_place_of_a_file_is_an_error_at_once() {
    let held = tempfile::tempdir().unwrap();
    let at = held.path();
    fs::create_dir(at.join("model")).unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(Path::new(FIXTURE).join(file), at.join("model").join(file)).unwrap();
    }
    let pipe = |path: &Path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    let folder = |path: &Path| fs::create_dir(path).unwrap();
    let link = |path: &Path| symlink("../nowhere", path).unwrap();
    let pointer = |path: &Path| {
        let text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234567\n";
        fs::write(path, text).unwrap();
    };
    let kinds: [(Make, &str); 4] = [
        (pipe, "it is a pipe"),
        (folder, "it is a folder"),
        (link, "it is a link to ../nowhere, which does not exist"),
        (pointer, "Git LFS"),
    ];
    let convert = ["convert", "model", "out"];
    for name in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ] {
        let (path, aside) = (at.join("model").join(name), at.join("aside"));
        let kept = fs::rename(&path, &aside).is_ok();
        for (make, says) in kinds {
            make(&path);
            let error = error(&convert, at);
            assert!(error.contains(name) && error.contains(says), "{error}");
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
        }
        if kept {
            fs::rename(&aside, &path).unwrap();
        }
    }
    assert!(!at.join("out").exists());
    // Token files, a text and prompts.
    pipe(&at.join("tokens.bin"));
    pipe(&at.join("tokens.idx"));
    let error_of_tokens = error(&["pretrain", "--data", "tokens", "--steps", "1"], at);
    let says = "tokens.idx': it is a pipe";
    assert!(error_of_tokens.contains(says), "{error_of_tokens}");
}
