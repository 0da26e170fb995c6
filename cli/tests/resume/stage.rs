//! Test folder with a recipe and a text, and `pretrain` commands in it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn_megatron_train::metrics::{MetricsRecord, read_metrics};

const RECIPE: &str = r#"
[parallel]
data = 1

[data_parallel]
zero_stage = 0

[model]
family = "gpt2"
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

pub const SAME: [&str; 4] = ["--dp", "2", "--zero-stage", "1"];

/// Temporary folder of a test, which is removed on drop.
pub struct Stage(pub PathBuf);

impl Stage {
    pub fn new(name: &str) -> Self {
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

    pub fn command(&self, run: &str, flags: &[&str]) -> Command {
        let mut command = self.alone(&[]);
        let path = |name: &str| self.0.join(name);
        command.arg("--recipe").arg(path("recipe.toml"));
        command.arg("--data").arg(path("text"));
        command.arg("--run-dir").arg(path(run));
        command.args(flags);
        command
    }

    /// Returns the command without the flags for the recipe, the data and the run folder.
    pub fn alone(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        command.args(["pretrain", "--compute-threads", "1", "--timeout", "60"]);
        command.args(flags);
        command
    }

    /// Runs `pretrain --resume RUN` with flags, which must succeed.
    pub fn resumes(&self, run: &str, flags: &[&str]) -> String {
        let run = self.0.join(run);
        let output = self.alone(&["--resume", run.to_str().unwrap()]);
        let output = { output }.args(flags).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    }

    /// Removes the `[checkpoint]` table from the recipe.
    pub fn without_a_table(self) -> Self {
        let (recipe, _) = RECIPE.split_once("[checkpoint]").unwrap();
        fs::write(self.0.join("recipe.toml"), recipe).unwrap();
        self
    }

    /// Runs to the end.
    pub fn run(&self, run: &str, flags: &[&str]) -> Output {
        self.command(run, flags).output().unwrap()
    }

    pub fn succeeds(&self, run: &str, flags: &[&str]) -> String {
        let output = self.run(run, flags);
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    }

    /// Checks that the command is refused with one line, before anything starts or is written.
    pub fn fails(&self, run: &str, flags: &[&str], says: &str) {
        let before = self.files(run);
        let said = self.fails_somewhere(run, flags, says);
        assert!(said.starts_with("error: "), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_eq!(self.files(run), before);
    }

    /// Checks that the command fails, possibly on its ranks.
    pub fn fails_somewhere(&self, run: &str, flags: &[&str], says: &str) -> String {
        let output = self.run(run, flags);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(says), "{says}: {said}");
        said
    }

    /// Returns the files of a run with their contents. The result is empty if there is no run.
    pub fn files(&self, run: &str) -> BTreeMap<PathBuf, Vec<u8>> {
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

    /// Starts a run, and sends a signal when the metrics contain `steps` steps.
    pub fn interrupt(&self, run: &str, flags: &[&str], steps: usize, signal: i32) -> Output {
        self.interrupt_of(self.command(run, flags), run, steps, signal)
    }

    pub fn interrupt_of(
        &self,
        mut command: Command,
        run: &str,
        steps: usize,
        signal: i32,
    ) -> Output {
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

    /// Returns the number of steps that were trained, including repeated steps.
    pub fn steps(&self, run: &str) -> usize {
        let text = fs::read_to_string(self.file(run, "metrics.jsonl")).unwrap_or_default();
        let is_step = |line: &&str| line.contains("\"kind\":\"step\"");
        text.lines().filter(is_step).count()
    }

    pub fn file(&self, run: &str, name: &str) -> PathBuf {
        self.0.join(run).join(name)
    }

    pub fn assert_same_metrics(&self, one: &str, other: &str) {
        assert_eq!(self.metrics(one), self.metrics(other));
    }

    /// Returns the valid records of the metrics.
    pub fn metrics(&self, run: &str) -> Vec<MetricsRecord> {
        read_metrics(&self.file(run, "metrics.jsonl")).unwrap()
    }

    pub fn raw_metrics(&self, run: &str) -> Vec<u8> {
        fs::read(self.file(run, "metrics.jsonl")).unwrap()
    }

    pub fn checkpoints(&self, run: &str) -> Vec<String> {
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
    // SAFETY: the process is a child that was not waited for, so its process id is not reused.
    let sent = unsafe { libc::kill(child.id() as i32, signal) };
    assert_eq!(sent, 0);
}

pub fn last_line(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    text.lines().last().unwrap_or_default().to_string()
}

pub fn text(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    format!("{out}{error}")
}

/// Checks that every step has exactly one valid line, in order.
pub fn assert_timed_once(path: &Path, steps: usize) {
    let text = fs::read_to_string(path).unwrap();
    let mut timed = vec![];
    for line in text.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        match (line["kind"].as_str(), line["step"].as_u64()) {
            (Some("resumed"), Some(step)) => timed.retain(|timed| *timed <= step),
            (None, Some(step)) => timed.push(step),
            (_, None) => assert!(line["saved_step"].is_u64(), "{line}"),
            _ => panic!("{line}"),
        }
    }
    assert_eq!(timed, Vec::from_iter(1..=steps as u64));
}
