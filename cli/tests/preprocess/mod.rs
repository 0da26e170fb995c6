//! Tests `burn-megatron preprocess` as a process that is stopped, and training on its files.
#![cfg(unix)]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Timeout for a process.
const DEADLINE: Duration = Duration::from_secs(60);

fn folder(name: &str) -> PathBuf {
    let name = format!("preprocess-{name}-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    fs::create_dir_all(&path).unwrap();
    path
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

/// Starts a process that has created its files and waits for standard input.
fn waiting(folder: &Path) -> Child {
    waiting_beside(folder, &[])
}

/// Starts such a process in a folder with leftover files of another process, which are removed at the start.
fn waiting_beside(folder: &Path, left: &[String]) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .args([
            "preprocess",
            "-",
            "--lines",
            "--tokenizer",
            "bytes",
            "--workers",
            "2",
            "--output",
        ])
        .arg(folder.join("out"))
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stdin = child.stdin.as_mut().unwrap();
    stdin
        .write_all("a line\n".repeat(100_000).as_bytes())
        .unwrap();
    let started = Instant::now();
    while names(folder).iter().all(|name| left.contains(name)) {
        assert!(started.elapsed() < DEADLINE, "it has begun no file");
        sleep(Duration::from_millis(10));
    }
    child
}

fn end_with(child: &mut Child, signal: &str) -> std::process::ExitStatus {
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args([signal, &id])
            .status()
            .unwrap()
            .success()
    );
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(started.elapsed() < DEADLINE, "it does not end");
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn an_interrupt_leaves_nothing() {
    for signal in ["-INT", "-TERM"] {
        let folder = folder(signal);
        let mut child = waiting(&folder);
        assert_eq!(end_with(&mut child, signal).code(), Some(130), "{signal}");
        assert_eq!(names(&folder), [""; 0], "{signal}");
        fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn work_that_was_killed_begins_anew() {
    let folder = folder("kill");
    let mut child = waiting(&folder);
    assert_eq!(end_with(&mut child, "-KILL").code(), None);
    let left = names(&folder);
    assert!(
        left.iter().all(|name| name.ends_with(".partial")),
        "{left:?}"
    );
    assert!(!left.is_empty());
    // Files of a live process are kept as long as it lives.
    let mut live = waiting_beside(&folder, &left);
    fs::write(folder.join("in.txt"), "one\ntwo\n").unwrap();
    let again = Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .args(["preprocess", "--lines", "--tokenizer", "bytes", "--output"])
        .args([folder.join("out"), folder.join("in.txt")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&again.stdout);
    assert!(
        again.status.success(),
        "{}",
        String::from_utf8_lossy(&again.stderr)
    );
    assert!(
        said.contains("out: 2 documents, 6 tokens of 6 bytes of text, 1.000 bytes per token"),
        "{said}"
    );
    let mut now = names(&folder);
    now.sort();
    assert!(now.iter().all(|name| !left.contains(name)), "{now:?}");
    assert_eq!([&now[0], &now[1]], ["in.txt", "out.bin"]);
    assert!(now[2].starts_with("out.bin.") && now[2].ends_with(".partial"));
    assert_eq!(now[3..], ["out.idx", "out.json"]);
    assert_eq!(end_with(&mut live, "-TERM").code(), Some(130));
    assert_eq!(names(&folder).len(), 4);
    fs::remove_dir_all(&folder).unwrap();
}

const TOKENIZER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../burn-megatron-data/tests/fixtures/tokenizer/byte_bpe"
);

const RECIPE: &str = "\
[parallel]
data = 1
[model]
family = 'gpt2'
context = 8
hidden = 8
layers = 1
heads = 1
vocabulary = 400
[train]
steps = 2
global_batch_size = 2
micro_batch_size = 1
warmup_steps = 1
[sample]
tokens = 0
";

/// Runs a command in a folder, and returns its output.
fn run(folder: &Path, words: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .args(words)
        .current_dir(folder)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {error}");
    format!("{}{error}", String::from_utf8_lossy(&output.stdout))
}

/// Returns bytes per token (nats per token over bits per byte) for each line of the metrics of a run.
fn ratios(run: &Path) -> Vec<f64> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    // The first line is the version.
    let lines = text.lines().skip(1).map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let of = |key: &str| line[key].as_f64().unwrap();
        of("loss") / of("bits_per_byte") / std::f64::consts::LN_2
    });
    lines.collect()
}

#[test]
fn losses_of_a_run_are_per_byte_of_its_text() {
    let folder = folder("training");
    let text = (0..400).map(|number| format!("line {number}: the dog and the fox\n"));
    let text: String = text.collect();
    fs::write(folder.join("text.txt"), &text).unwrap();
    fs::write(folder.join("recipe.toml"), RECIPE).unwrap();
    let tokenizer = ["--tokenizer", TOKENIZER];
    let flags = [
        "preprocess",
        "text.txt",
        "--lines",
        "--append-eod",
        "--output",
        "tokens",
    ];
    run(&folder, &[&flags[..], &tokenizer].concat());
    let info = fs::read(folder.join("tokens.json")).unwrap();
    let info: serde_json::Value = serde_json::from_slice(&info).unwrap();
    assert_eq!(info["bytes"], text.len() - 400);
    let bytes_per_token = info["bytes"].as_f64().unwrap() / info["tokens"].as_f64().unwrap();

    let pretrain = ["pretrain", "--recipe", "recipe.toml", "--run-dir"];
    let files = [
        "files",
        "--data",
        "tokens.idx",
        "--data.split",
        "80,20",
        "--data.cache",
        "cache",
    ];
    let said = run(&folder, &[&pretrain[..], &files].concat());
    assert!(
        said.contains(" nats per token (") && said.contains(" bits per byte) after"),
        "{said}"
    );
    let found = ratios(&folder.join("files"));
    assert_eq!(found.len(), 3);
    assert!(
        found
            .iter()
            .all(|ratio| (ratio - bytes_per_token).abs() < 1e-9),
        "{found:?}"
    );
    assert!(!names(&folder.join("cache")).is_empty());

    let said = run(
        &folder,
        &[&pretrain[..], &["text", "--data", "text.txt"], &tokenizer].concat(),
    );
    assert!(said.contains(" tokens of "), "{said}");
    let found = ratios(&folder.join("text"));
    let near = |ratio: &f64| *ratio > 1.5 && (ratio - bytes_per_token).abs() < 0.2;
    assert!(
        found.len() == 3 && found.iter().all(near),
        "{found:?}, {bytes_per_token}"
    );

    // Without metadata, the number of bytes is unknown, and the loss is reported per token.
    fs::remove_file(folder.join("tokens.json")).unwrap();
    let said = run(&folder, &[&pretrain[..], &["bare"], &files[1..5]].concat());
    assert!(
        said.contains(" nats per token (") && said.contains(" bits) after"),
        "{said}"
    );
    assert!(
        said.contains(" bits per token\n") && !said.contains("per byte"),
        "{said}"
    );
    fs::remove_dir_all(&folder).unwrap();
}
