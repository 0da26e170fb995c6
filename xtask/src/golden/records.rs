//! The recorded results of runs: values for every processor, and bits for each recorded processor.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::runs::{GoldenResult, GoldenRun, Results};
use super::{processor, read_json, write_json};
use crate::differences;

/// The minimum number of runs that a check must compare.
const FEWEST: usize = 24;

/// Writes the values and the bits of this processor. If a value changed, the bits of other processors are out of date
/// and are removed.
pub fn write(folder: &Path, runs: &[GoldenRun], results: &Results) -> Result<(), String> {
    let found = part(results, |result| &result.values);
    let path = folder.join("values.json");
    let own = bits_file(folder, &processor::name()?);
    let is_same = path.is_file() && compare_values(&read_json(&path)?, &found, runs).is_ok();
    if !is_same {
        for file in all_bits(folder)?.iter().filter(|file| **file != own) {
            fs::remove_file(file).map_err(|e| format!("{}: {e}", file.display()))?;
            println!("{} removed: the results changed", file.display());
        }
    }
    write_json(&path, &found)?;
    write_json(&own, &part(results, |result| &result.bits))
}

/// Compares the values up to the bound of each run, and the bits if this processor has a record.
pub fn check(folder: &Path, runs: &[GoldenRun], results: &Results) -> Result<(), String> {
    if runs.len() < FEWEST {
        return Err(format!("{} runs, expected at least {FEWEST}", runs.len()));
    }
    let found = part(results, |result| &result.values);
    compare_values(&read_json(&folder.join("values.json"))?, &found, runs)?;
    let name = processor::name()?;
    let file = bits_file(folder, &name);
    if !file.is_file() {
        println!(
            "{} runs have the recorded values; bits not compared, as the processor {name} has no record",
            runs.len()
        );
        return Ok(());
    }
    let bits = part(results, |result| &result.bits);
    differences::within(&read_json(&file)?, &bits, |_| 0.0)?;
    println!("{} runs have the bits of the record of {name}", runs.len());
    Ok(())
}

fn compare_values(recorded: &Value, found: &Value, runs: &[GoldenRun]) -> Result<(), String> {
    differences::within(recorded, found, |path| {
        let name = path.split('/').next();
        let run = runs.iter().find(|run| Some(&run.name[..]) == name);
        run.map_or(0.0, |run| run.bound)
    })
}

fn part(results: &Results, of: impl Fn(&GoldenResult) -> &Value) -> Value {
    let pairs = results
        .iter()
        .map(|(name, result)| (name.clone(), of(result).clone()));
    Value::Object(pairs.collect::<Map<_, _>>())
}

fn bits_file(folder: &Path, processor: &str) -> PathBuf {
    folder.join("bits").join(format!("{processor}.json"))
}

fn all_bits(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let bits = folder.join("bits");
    if !bits.is_dir() {
        return Ok(vec![]);
    }
    let entries = fs::read_dir(&bits).map_err(|e| format!("{}: {e}", bits.display()))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::temp::TempDir;

    /// Returns runs and their results. The loss of the last run is `loss`.
    fn results(count: usize, loss: f64, bits: &str) -> (Vec<GoldenRun>, Results) {
        let lines: String = (0..count)
            .map(|run| format!("run-{run:02}\t1e-10\t--seed {run}\n"))
            .collect();
        let runs = GoldenRun::parse(&lines).unwrap();
        let results = runs.iter().map(|run| {
            let result = GoldenResult {
                values: json!({ "loss": [loss] }),
                bits: json!({ "metrics.jsonl": bits }),
            };
            (run.name.clone(), result)
        });
        let results = results.collect();
        (runs, results)
    }

    #[test]
    fn changed_bits_and_values_are_found() {
        let folder = TempDir::new("golden-records").unwrap();
        let (runs, recorded) = results(24, 1.0, "aa");
        write(folder.path(), &runs, &recorded).unwrap();
        check(folder.path(), &runs, &recorded).unwrap();
        let (_, changed) = results(24, 1.0 + 1e-12, "bb");
        let error = check(folder.path(), &runs, &changed).unwrap_err();
        assert!(
            error.starts_with("run-00/metrics.jsonl: \"bb\", expected \"aa\""),
            "{error}"
        );
        let (_, changed) = results(24, 1.0 + 1e-8, "aa");
        let error = check(folder.path(), &runs, &changed).unwrap_err();
        assert!(
            error.contains("run-00/loss/0: 1.00000001, expected 1.0"),
            "{error}"
        );
    }

    #[test]
    fn another_processor_compares_the_values_alone() {
        let folder = TempDir::new("golden-records").unwrap();
        let (runs, recorded) = results(24, 1.0, "aa");
        write(folder.path(), &runs, &recorded).unwrap();
        let own = bits_file(folder.path(), &processor::name().unwrap());
        let other = bits_file(folder.path(), "other");
        fs::rename(own, &other).unwrap();
        let (_, close) = results(24, 1.0 + 1e-12, "bb");
        check(folder.path(), &runs, &close).unwrap();
        let (_, far) = results(24, 1.0 + 1e-8, "bb");
        assert!(check(folder.path(), &runs, &far).is_err());
        // The bits of the other processor are kept until the values change.
        write(folder.path(), &runs, &close).unwrap();
        assert!(other.is_file());
        write(folder.path(), &runs, &far).unwrap();
        assert!(!other.exists());
    }

    #[test]
    fn too_few_runs_and_a_missing_run_fail() {
        let folder = TempDir::new("golden-records").unwrap();
        let (runs, recorded) = results(24, 1.0, "aa");
        write(folder.path(), &runs, &recorded).unwrap();
        let (few, of_few) = results(23, 1.0, "aa");
        let error = check(folder.path(), &few, &of_few).unwrap_err();
        assert_eq!(error, "23 runs, expected at least 24");
        let error = check(folder.path(), &runs, &of_few).unwrap_err();
        assert!(error.contains("run-23: null, expected"), "{error}");
    }
}
