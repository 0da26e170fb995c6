//! Tests run folders of every model family that an earlier version of the command wrote: see
//! `fixtures/earlier/make.sh`.
//!
//! The settings are read only from the checkpoints, without a recipe.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{panic, thread};

use serde_json::Value;
use sha2::{Digest, Sha256};
use toml::Table;

use crate::earlier::{fixture, losses, text};

/// The step of the checkpoints.
const STEP: usize = 2;

/// The maximum relative difference of a loss, and the maximum difference of a log-probability. It allows for the
/// instruction sets of other machines. Other layouts differ by about 5e-8 and 5e-7.
const BOUND: f64 = 1e-5;

/// The number of run folders that are checked concurrently.
const WORKERS: usize = 2;

/// Runs the command in the folder of the fixtures, because the path in `lora.base_model` is relative to it.
fn output(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.current_dir(fixture("")).args(arguments);
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    format!("{out}{error}")
}

/// Runs the command, which must succeed.
fn run(arguments: &[&str]) -> Result<(), String> {
    let output = output(arguments);
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{arguments:?} failed\n{}", said(&output))),
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Run folder of an earlier version.
struct Earlier {
    name: String,
    folder: PathBuf,
}

impl Earlier {
    /// Returns all run folders, ordered by name.
    fn all() -> Vec<Self> {
        let entries = fs::read_dir(fixture("families")).unwrap();
        let folders = entries.map(|entry| entry.unwrap().path());
        let mut folders: Vec<_> = folders.filter(|path| path.is_dir()).collect();
        folders.sort();
        let run = |folder: PathBuf| Self {
            name: folder.file_name().unwrap().to_str().unwrap().into(),
            folder,
        };
        folders.into_iter().map(run).collect()
    }

    fn checkpoint(&self) -> String {
        let path = self.folder.join(format!("checkpoints/step-{STEP:08}"));
        text(&path).into()
    }

    /// Resumes from the checkpoint, and compares the losses with the recorded losses.
    fn check_losses(&self, temporary: &Path) -> Result<(), String> {
        let run_folder = temporary.join("run");
        let resume = ["pretrain", "--resume", &self.checkpoint(), "--data", "text"];
        let to = ["--run-dir", text(&run_folder), "--compute-threads", "1"];
        run(&[&resume[..], &to[..]].concat())?;
        let mut wanted = losses(&self.folder);
        wanted.retain(|(_, step, _)| *step > STEP);
        let found = losses(&run_folder);
        let places = |losses: &[(&'static str, usize, f64)]| {
            let places = losses.iter().map(|(kind, step, _)| (*kind, *step));
            places.collect::<Vec<_>>()
        };
        let is_near = |(wanted, found): (&(_, _, f64), &(_, _, f64))| {
            (found.2 / wanted.2 - 1.0).abs() <= BOUND
        };
        let are_near = wanted.iter().zip(&found).all(is_near);
        match places(&wanted) == places(&found) && wanted.len() == 3 && are_near {
            true => Ok(()),
            false => Err(format!("expected losses {wanted:?}, got {found:?}")),
        }
    }

    /// Converts the checkpoint to Hugging Face's format, and compares the hashes of the files.
    fn check_files(&self, temporary: &Path) -> Result<(), String> {
        let mut hashes = BTreeMap::<_, Vec<_>>::new();
        let lines = read(&self.folder.join("exported.sha256"))?;
        for line in lines.lines() {
            let (hash, path) = line.split_once("  ").unwrap();
            let (kind, file) = path.split_once('/').unwrap();
            hashes.entry(kind).or_default().push((hash, file));
        }
        assert!(hashes.contains_key("plain"), "{lines}");
        let mut differences = vec![];
        for (kind, files) in hashes {
            let to = temporary.join(kind);
            let flag = format!("--{kind}");
            let flags = if kind == "plain" {
                vec![]
            } else {
                vec![&flag[..]]
            };
            let convert = ["convert", &self.checkpoint(), text(&to)];
            run(&[&convert[..], &flags].concat())?;
            for (hash, file) in files {
                let bytes = fs::read(to.join(file)).map_err(|e| format!("{kind}/{file}: {e}"))?;
                let found = Sha256::digest(&bytes);
                let found: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
                if found != hash {
                    let shown = match file.ends_with(".json") {
                        true => String::from_utf8_lossy(&bytes).into(),
                        false => format!("{} bytes", bytes.len()),
                    };
                    differences.push(format!("{kind}/{file} has other bytes: {shown}"));
                }
            }
        }
        match differences.is_empty() {
            true => Ok(()),
            false => Err(differences.join("\n")),
        }
    }

    /// Generates text from the checkpoint, and compares its tokens and their log-probabilities.
    fn check_text(&self, temporary: &Path) -> Result<(), String> {
        let parsed = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let wanted = parsed(&read(&self.folder.join("generated.jsonl"))?);
        let tokens = wanted["tokens"].as_array().unwrap().len().to_string();
        let prompt = wanted["prompt"].as_str().unwrap();
        let to = temporary.join("generated.jsonl");
        let generate = [
            "generate",
            "--model",
            &self.checkpoint(),
            "--prompt",
            prompt,
        ];
        let greedy = ["--temperature", "0", "--max-tokens", &tokens];
        let output = ["--logprobs", "--output", text(&to)];
        run(&[&generate[..], &greedy[..], &output[..]].concat())?;
        let found = parsed(&read(&to)?);
        let numbers = |record: &Value| {
            let numbers = record["logprobs"].as_array().unwrap().iter();
            numbers.map(|n| n.as_f64().unwrap()).collect::<Vec<_>>()
        };
        let pairs = numbers(&wanted).into_iter().zip(numbers(&found));
        let are_near = pairs
            .map(|(wanted, found)| (wanted - found).abs())
            .all(|d| d <= BOUND);
        let is_equal = ["text", "tokens"]
            .iter()
            .all(|key| wanted[*key] == found[*key]);
        match is_equal && are_near {
            true => Ok(()),
            false => Err(format!("expected {wanted}, got {found}")),
        }
    }
}

/// Checks every run folder, and panics with the names of all that fail.
fn check_all(check: fn(&Earlier, &Path) -> Result<(), String>) {
    let runs = Earlier::all();
    let failure = |run: &Earlier| {
        let temporary = tempfile::tempdir().unwrap();
        let checked = panic::catch_unwind(|| check(run, temporary.path()));
        let error = checked.unwrap_or(Err("panicked, see above".into())).err()?;
        Some(format!("{}: {error}", run.name))
    };
    let failures: Vec<String> = thread::scope(|scope| {
        let of_worker = |worker| {
            runs.iter()
                .skip(worker)
                .step_by(WORKERS)
                .filter_map(failure)
        };
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| scope.spawn(move || of_worker(worker).collect::<Vec<_>>()))
            .collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap())
            .collect()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn a_run_of_every_family_is_resumed() {
    check_all(Earlier::check_losses);
}

#[test]
fn a_model_of_every_family_is_converted_to_the_same_files() {
    check_all(Earlier::check_files);
}

#[test]
fn a_model_of_every_family_generates_the_same_text() {
    check_all(Earlier::check_text);
}

/// Checks that there is a run folder for each family. The command lists its families if a recipe names an unknown
/// family.
#[test]
fn every_family_of_the_command_has_a_run_folder() {
    let said = said(&output(&[
        "pretrain",
        "--set",
        "model.family=none",
        "--print-recipe",
    ]));
    let (_, known) = said.split_once("expected ").expect(&said);
    let known: BTreeSet<_> = known.trim().split(", ").collect();
    assert!(known.contains("llama"), "{said}");
    let family = |run: &Earlier| {
        let config = read(&run.folder.join("config.toml")).unwrap();
        let config: Table = config.parse().unwrap();
        config["model"]["family"].as_str().unwrap().to_string()
    };
    let found: BTreeSet<_> = Earlier::all().iter().map(family).collect();
    let missing: Vec<_> = known
        .iter()
        .filter(|name| !found.contains(**name))
        .collect();
    assert!(
        missing.is_empty(),
        "no run folder of {missing:?}: add recipes to fixtures/earlier/families"
    );
}
