//! The runs whose results are recorded.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::fuzz_layouts::Runner;
use crate::temp::TempDir;

/// The text that all runs train on, relative to the repository.
const TEXT: &str = "cli/tests/fixtures/earlier/text";

/// The steps of a run.
const STEPS: &str = "12";

/// The maximum time of a run.
const DEADLINE: Duration = Duration::from_secs(120);

/// A run, as listed in `runs.tsv`.
#[derive(Debug, PartialEq)]
pub struct GoldenRun {
    pub name: String,
    /// The maximum relative difference of its losses and gradient norms on another processor.
    pub bound: f64,
    /// The flags of `pretrain`.
    flags: Vec<String>,
}

/// The results of a run.
pub struct GoldenResult {
    /// Losses and gradient norms of all steps, and held-out losses.
    pub values: Value,
    /// The hashes of the files of the run, by their paths in the run folder.
    pub bits: Value,
}

/// The results of runs, by name.
pub type Results = BTreeMap<String, GoldenResult>;

impl GoldenRun {
    /// Reads `NAME<TAB>BOUND<TAB>FLAGS` from each line. Empty lines and lines that begin with `#` are skipped.
    pub fn parse(text: &str) -> Result<Vec<Self>, String> {
        let lines = (1..).zip(text.lines());
        let lines = lines.filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
        let runs = lines.map(|(number, line)| {
            let wrong =
                || format!("runs.tsv:{number}: expected `name<TAB>bound<TAB>flags`: {line:?}");
            let fields: Vec<_> = line.split('\t').collect();
            let [name, bound, flags] = fields[..] else {
                return Err(wrong());
            };
            Ok(Self {
                name: name.into(),
                bound: bound.parse().map_err(|_| wrong())?,
                flags: flags.split_whitespace().map(str::to_owned).collect(),
            })
        });
        runs.collect()
    }

    /// Trains in a temporary folder, and reads the results.
    fn train(&self, program: &Path, root: &Path) -> Result<GoldenResult, String> {
        let folder = TempDir::new("golden").map_err(|e| format!("a temporary folder: {e}"))?;
        let [text, run] = [root.join(TEXT), folder.path().join("run")];
        let [text, run_dir] = [&text, &run].map(|path| path.display().to_string());
        let ours = [
            "pretrain",
            "--data",
            &text,
            "--run-dir",
            &run_dir,
            "--steps",
            STEPS,
            "--compute-threads",
            "1",
        ];
        // The run has its own folder, so paths must be absolute.
        let flags = self.flags.iter().map(|flag| match flag.ends_with(".toml") {
            true => root.join(flag).display().to_string(),
            false => flag.clone(),
        });
        let flags: Vec<_> = flags.collect();
        let args: Vec<_> = ours
            .into_iter()
            .chain(flags.iter().map(|flag| &flag[..]))
            .collect();
        let runner = Runner {
            program,
            timeout: DEADLINE,
        };
        let ended = runner.run(folder.path(), "run", &args)?;
        if ended.code() != Some(0) {
            return Err(format!(
                "exit code {:?}\n{}",
                ended.code(),
                ended.messages()
            ));
        }
        Ok(GoldenResult {
            values: values(&run)?,
            bits: bits(&run)?,
        })
    }
}

/// Trains all runs. The number of runs at the same time is the number of processors.
///
/// # Errors
///
/// Returns the names of all runs that failed, with their output.
pub fn results(runs: &[GoldenRun], program: &Path, root: &Path) -> Result<Results, String> {
    let waiting = Mutex::new(runs.iter());
    let (results, failures) = (Mutex::new(Results::new()), Mutex::new(vec![]));
    let next = || waiting.lock().expect("no run panics").next();
    let work = || {
        while let Some(run) = next() {
            match run.train(program, root) {
                Ok(result) => {
                    let mut results = results.lock().expect("no run panics");
                    results.insert(run.name.clone(), result);
                }
                Err(error) => {
                    let mut failures = failures.lock().expect("no run panics");
                    failures.push(format!("{}: {error}", run.name));
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let failures = failures.into_inner().expect("no run panics");
    match failures.len() {
        0 => Ok(results.into_inner().expect("no run panics")),
        count => Err(format!("{count} runs failed\n{}", failures.join("\n"))),
    }
}

/// Returns the losses and the norms of `metrics.jsonl`, in order.
fn values(run: &Path) -> Result<Value, String> {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let (mut losses, mut norms, mut held_out) = (vec![], vec![], vec![]);
    for line in text.lines() {
        let mut record: Value =
            serde_json::from_str(line).map_err(|e| format!("{}: {e}", path.display()))?;
        match record["kind"].as_str() {
            Some("step") => {
                losses.push(record["loss"].take());
                norms.push(record["gradient_norm"].take());
            }
            Some("held_out") => held_out.push(record["loss"].take()),
            _ => {}
        }
    }
    Ok(json!({ "loss": losses, "gradient_norm": norms, "held_out_loss": held_out }))
}

/// Returns the hashes of the metrics, and of all tensors in checkpoints and exports. The other files are left out,
/// except the configuration of an export: they contain keys of settings, which may be renamed.
fn bits(run: &Path) -> Result<Value, String> {
    let mut files = vec![run.join("metrics.jsonl")];
    let mut folders = vec![run.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
            } else if name.ends_with(".safetensors") || name == "config.json" {
                files.push(path);
            }
        }
    }
    let hashes = files.iter().map(|path| {
        let bytes = fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let name = path.strip_prefix(run).unwrap_or(path);
        Ok((name.display().to_string(), hash(&bytes)))
    });
    let hashes: BTreeMap<_, _> = hashes.collect::<Result<_, String>>()?;
    Ok(json!(hashes))
}

/// Returns the first 16 hexadecimal digits of SHA-256.
pub fn hash(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_name_a_bound_and_flags() {
        let runs = GoldenRun::parse("# a comment\n\ntp2\t1e-10\t--tp 2  --sp\n").unwrap();
        let expected = GoldenRun {
            name: "tp2".into(),
            bound: 1e-10,
            flags: vec!["--tp".into(), "2".into(), "--sp".into()],
        };
        assert_eq!(runs, [expected]);
        for wrong in ["tp2\t--tp 2\n", "tp2\tsmall\t--tp 2\n"] {
            let error = GoldenRun::parse(wrong).unwrap_err();
            assert!(error.starts_with("runs.tsv:1: expected"), "{error}");
        }
    }

    #[test]
    fn tensors_metrics_and_configurations_are_hashed() {
        let run = TempDir::new("golden-bits").unwrap();
        run.write(
            "metrics.jsonl",
            "{\"kind\":\"step\",\"loss\":2.5,\"gradient_norm\":1.0}\n",
        );
        run.write("checkpoints/step-00000012/part-00000.safetensors", "abc");
        run.write("checkpoints/step-00000012/manifest.json", "{}");
        run.write("hugging-face/step-00000012/config.json", "{}");
        let found = bits(run.path()).unwrap();
        let names: Vec<_> = found.as_object().unwrap().keys().cloned().collect();
        let expected = [
            "checkpoints/step-00000012/part-00000.safetensors",
            "hugging-face/step-00000012/config.json",
            "metrics.jsonl",
        ];
        assert_eq!(names, expected);
        assert_eq!(found[expected[0]], "ba7816bf8f01cfea");
        let values = values(run.path()).unwrap();
        assert_eq!(
            values,
            json!({ "loss": [2.5], "gradient_norm": [1.0], "held_out_loss": [] })
        );
    }
}
