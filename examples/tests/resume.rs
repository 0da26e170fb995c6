//! `burn-megatron pretrain` that is ended in the middle, and goes on as if it had not been.
#![cfg(unix)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const RECIPE: &str = r#"
[model]
layers = 2
hidden = 16
heads = 4
context = 16
dropout = 0.1

[train]
micro_batch_size = 2
global_batch_size = 8
held_out_samples = 8
steps = 60
evaluate_every = 25
learning_rate = 1e-3
warmup_steps = 2

[sample]
prompt = "fn"
tokens = 4

[checkpoint]
every = 10
keep_last = 2
"#;

const SAME: [&str; 4] = ["--dp", "2", "--zero-stage", "1"];

/// A folder of one test, gone with it.
struct Stage(PathBuf);

impl Stage {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("resume-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("text")).unwrap();
        fs::write(folder.join("recipe.toml"), RECIPE).unwrap();
        for file in 0..4 {
            let text = format!("fn number_{file}() -> usize {{ {file} }}\n").repeat(40);
            fs::write(folder.join(format!("text/{file}.rs")), text).unwrap();
        }
        Self(folder)
    }

    fn command(&self, run: &str, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        let path = |name: &str| self.0.join(name);
        command
            .arg("pretrain")
            .arg("--recipe")
            .arg(path("recipe.toml"));
        command.arg("--data").arg(path("text"));
        command.arg("--run-dir").arg(path(run));
        command.args(["--compute-threads", "1", "--deadline", "60"]);
        command.args(flags);
        command
    }

    /// Runs to the end.
    fn run(&self, run: &str, flags: &[&str]) -> Output {
        self.command(run, flags).output().unwrap()
    }

    fn succeeds(&self, run: &str, flags: &[&str]) -> String {
        let output = self.run(run, flags);
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    }

    /// It is refused in one line, before anything starts and before anything is written.
    fn fails(&self, run: &str, flags: &[&str], says: &str) {
        let before = self.files(run);
        let said = self.fails_somewhere(run, flags, says);
        assert!(said.starts_with("error: "), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_eq!(self.files(run), before);
    }

    /// It fails, perhaps on its ranks.
    fn fails_somewhere(&self, run: &str, flags: &[&str], says: &str) -> String {
        let output = self.run(run, flags);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(says), "{says}: {said}");
        said
    }

    /// The files of a run, with their contents; none where there is no run.
    fn files(&self, run: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        let (mut files, mut folders) = (BTreeMap::new(), vec![self.0.join(run)]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten() {
                let path = entry.unwrap().path();
                match fs::read(&path) {
                    Ok(bytes) => drop(files.insert(path, bytes)),
                    Err(_) => folders.push(path),
                }
            }
        }
        files
    }

    /// Begins, and sends a signal when so many steps are in the metrics.
    fn interrupt(&self, run: &str, flags: &[&str], steps: usize, signal: i32) -> Output {
        let mut command = self.command(run, flags);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn().unwrap();
        let begun = Instant::now();
        while self.steps(run) < steps {
            assert!(begun.elapsed() < Duration::from_secs(120), "no steps");
            assert!(child.try_wait().unwrap().is_none(), "it ended too early");
            sleep(Duration::from_millis(2));
        }
        send(&child, signal);
        child.wait_with_output().unwrap()
    }

    fn steps(&self, run: &str) -> usize {
        let text = fs::read_to_string(self.file(run, "metrics.jsonl")).unwrap_or_default();
        let is_step = |line: &&str| line.contains("\"kind\":\"step\"");
        text.lines().filter(is_step).count()
    }

    fn file(&self, run: &str, name: &str) -> PathBuf {
        self.0.join(run).join(name)
    }

    fn assert_same_metrics(&self, one: &str, other: &str) {
        let read = |run| fs::read_to_string(self.file(run, "metrics.jsonl")).unwrap();
        let (one, other) = (read(one), read(other));
        for (a, b) in one.lines().zip(other.lines()) {
            assert_eq!(a, b);
        }
        assert_eq!(one.len(), other.len());
    }

    fn checkpoints(&self, run: &str) -> Vec<String> {
        let entries = fs::read_dir(self.file(run, "checkpoints")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name.starts_with("step-")).collect();
        names.sort();
        names
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn send(child: &Child, signal: i32) {
    // SAFETY: the process is a child that was not waited for, so its number is its own.
    let sent = unsafe { libc::kill(child.id() as i32, signal) };
    assert_eq!(sent, 0);
}

fn text(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    format!("{out}{error}")
}

/// Every step has one line, in order.
fn assert_timed_once(path: &Path, steps: usize) {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|line| line.starts_with("{\"step\":"));
    let lines: Vec<_> = lines.collect();
    assert_eq!(lines.len(), steps);
    for (step, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("{{\"step\":{step},")), "{line}");
    }
}

#[test]
fn an_interrupted_run_goes_on_with_the_same_metrics() {
    let stage = Stage::new("interrupted");
    let whole = stage.succeeds("whole", &SAME);
    assert!(whole.contains("saved step 60 in "), "{whole}");
    assert_eq!(
        stage.checkpoints("whole"),
        ["step-00000050", "step-00000060"]
    );
    for (name, signal, asynchronous) in [
        ("terminated", libc::SIGTERM, "false"),
        ("pressed", libc::SIGINT, "true"),
    ] {
        let auto = ["--resume", "auto", "--async-save", asynchronous];
        let flags = [&SAME[..], &auto].concat();
        let ended = stage.interrupt(name, &flags, 23, signal);
        let said = text(&ended);
        assert_eq!(ended.status.code(), Some(130), "{said}");
        let folder = stage.0.join(name);
        let says = format!("--run-dir {} --resume auto", folder.display());
        assert!(said.contains(&says), "{said}");
        let made = stage.steps(name);
        assert!((23..60).contains(&made));
        let saved = format!("step-{made:08}");
        assert!(stage.checkpoints(name).contains(&saved), "{saved}");
        let said = stage.succeeds(name, &flags);
        assert!(
            said.contains(&format!("resumed  after step {made}, ")),
            "{said}"
        );
        stage.assert_same_metrics("whole", name);
        assert_timed_once(&stage.file(name, "timings.jsonl"), 60);
        // A run that is over is over.
        stage.succeeds(name, &flags);
        stage.assert_same_metrics("whole", name);
    }
}

#[test]
fn a_killed_run_goes_on_from_its_newest_checkpoint() {
    let stage = Stage::new("killed");
    stage.succeeds("whole", &SAME);
    let auto = [&SAME[..], &["--resume", "auto"]].concat();
    // Before the first checkpoint, then after some.
    for steps in [3, 25] {
        let ended = stage.interrupt("killed", &auto, steps, libc::SIGKILL);
        assert_eq!(ended.status.code(), None);
    }
    let said = stage.succeeds("killed", &auto);
    assert!(said.contains("resumed  after step "), "{said}");
    stage.assert_same_metrics("whole", "killed");
    assert_timed_once(&stage.file("killed", "timings.jsonl"), 60);
}

#[test]
fn a_broken_checkpoint_is_passed_over() {
    let stage = Stage::new("broken");
    stage.succeeds("run", &SAME);
    let newest = stage.file("run", "checkpoints/step-00000060");
    let part = newest.join("part-00001.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 4;
    fs::write(&part, bytes).unwrap();
    let before = fs::read_to_string(stage.file("run", "metrics.jsonl")).unwrap();
    let said = stage.succeeds("run", &[&SAME[..], &["--resume", "auto"]].concat());
    assert!(said.contains("passed over"), "{said}");
    assert!(said.contains("resumed  after step 50, "), "{said}");
    let after = fs::read_to_string(stage.file("run", "metrics.jsonl")).unwrap();
    assert_eq!(before, after);
    assert_eq!(stage.checkpoints("run"), ["step-00000050", "step-00000060"]);
}

#[test]
fn what_would_be_another_run_is_refused() {
    let stage = Stage::new("refused");
    stage.succeeds("run", &SAME);
    let path = stage.file("run", "checkpoints");
    let path = path.to_str().unwrap();
    let from = ["--resume", path];
    stage.fails(
        "run",
        &[],
        "is there already; go on with it by --resume auto",
    );
    stage.fails(
        "new",
        &[&from[..], &["--lr", "0.5"]].concat(),
        "train.learning_rate = 0.001",
    );
    stage.fails(
        "new2",
        &[&from[..], &["--seed", "9"]].concat(),
        "train.seed = 1",
    );
    let precision = ["--precision", "bf16"];
    stage.fails(
        "new3",
        &[&from[..], &precision].concat(),
        "data_parallel.precision",
    );
    stage.fails(
        "run",
        &["--resume", "auto", "--seed", "9"],
        "train.seed = 1",
    );
    stage.fails("text", &["--resume", "auto"], "is no run folder");
    stage.fails("text", &from, "is there already");
    let strange = [&from[..], &["--resume-changing", "train.step"]].concat();
    stage.fails("new4", &strange, "names no setting");
    let recipe = fs::read_to_string(stage.0.join("recipe.toml")).unwrap();
    let other = recipe.replace("layers = 2", "layers = 3");
    fs::write(stage.0.join("recipe.toml"), other).unwrap();
    stage.fails("deeper", &from, "model.layers = 2, and this one has 3");
    fs::write(stage.0.join("recipe.toml"), recipe).unwrap();
    let manifest = stage.file("run", "checkpoints/step-00000060/manifest.json");
    let whole = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, &whole[..whole.len() / 2]).unwrap();
    stage.fails("damaged", &from, "manifest.json");
    fs::write(&manifest, whole).unwrap();
    // Other text is other data.
    fs::write(stage.0.join("text/0.rs"), "fn other() {}\n".repeat(200)).unwrap();
    stage.fails("new5", &from, "data_fingerprint");
}

#[test]
fn another_layout_and_a_longer_run_go_on() {
    let stage = Stage::new("layout");
    stage.succeeds("run", &["--dp", "2", "--zero-stage", "3", "--steps", "20"]);
    let path = stage.file("run", "checkpoints/step-00000010");
    let from = ["--resume", path.to_str().unwrap()];
    let other = ["--tp", "2", "--pp", "2", "--steps", "20"];
    let said = stage.succeeds("other", &[&from[..], &other].concat());
    assert!(said.contains("resumed  after step 10, "), "{said}");
    let losses = |run, skip| -> Vec<f64> {
        let text = fs::read_to_string(stage.file(run, "metrics.jsonl")).unwrap();
        let steps = text
            .lines()
            .filter(|line| line.contains("\"kind\":\"step\""));
        let loss = |line: &str| {
            let (_, rest) = line.split_once("\"loss\":").unwrap();
            rest.split_once(',').unwrap().0.parse().unwrap()
        };
        steps.skip(skip).map(loss).collect()
    };
    let (same, other) = (losses("run", 10), losses("other", 0));
    assert_eq!((same.len(), other.len()), (10, 10));
    for (a, b) in same.iter().zip(&other) {
        assert!((a / b - 1.0).abs() < 1e-4, "{a} {b}");
    }
    let longer = ["--dp", "2", "--zero-stage", "3", "--resume", "auto"];
    stage.fails("run", &longer, "train.steps = 20, and this one has 60");
    let changing = ["--resume-changing", "train.steps,train.warmup_steps"];
    stage.succeeds("run", &[&longer[..], &changing].concat());
    assert_eq!(stage.steps("run"), 60);
    assert_timed_once(&stage.file("run", "timings.jsonl"), 60);
}

#[test]
fn weights_alone_begin_another_run() {
    let stage = Stage::new("weights");
    stage.succeeds("run", &["--dp", "2", "--steps", "20"]);
    let path = stage.file("run", "checkpoints");
    let load = ["--load", path.to_str().unwrap()];
    let said = stage.succeeds(
        "new",
        &[&load[..], &["--lr", "0.002", "--seed", "4"]].concat(),
    );
    assert!(said.contains("weights  "), "{said}");
    let first = |run| {
        let text = fs::read_to_string(stage.file(run, "metrics.jsonl")).unwrap();
        text.lines().next().unwrap().to_string()
    };
    assert!(first("new").contains("\"step\":0,"));
    assert_ne!(first("new"), first("run"));
    let deeper = fs::read_to_string(stage.0.join("recipe.toml")).unwrap();
    let deeper = deeper.replace("layers = 2", "layers = 3");
    fs::write(stage.0.join("recipe.toml"), deeper).unwrap();
    stage.fails("deeper", &load, "model.layers is 3, there 2");
    let settings = ["--lenient", "settings"];
    stage.fails_somewhere(
        "otherwise",
        &[&load[..], &settings].concat(),
        "has no model/blocks.2.",
    );
    stage.succeeds(
        "lenient",
        &[&load[..], &["--lenient", "missing", "--steps", "2"]].concat(),
    );
}
