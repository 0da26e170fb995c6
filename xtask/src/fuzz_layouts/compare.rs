//! Compares the results of two runs: their metrics, their sample, and their last checkpoint.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::differences::within;

/// The largest relative difference of a metric that rounding explains in f64.
const RELATIVE: f64 = 1e-9;

/// The largest absolute difference of a weight that rounding explains in f64. Weights are at most about 1.
const ABSOLUTE: f64 = 1e-9;

/// The kinds of metrics that the layout must not change.
const KINDS: [&str; 4] = ["step", "held_out", "experts", "expert_load"];

/// The metrics of a run, by kind and step.
pub type Metrics = BTreeMap<(String, u64), Value>;

/// Reads the metrics of a run. The map is empty if the run has not begun.
pub fn metrics(run: &Path) -> Metrics {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let records = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let record = |record: Value| {
        let kind = record["kind"]
            .as_str()
            .filter(|kind| KINDS.contains(kind))?;
        Some(((kind.to_owned(), record["step"].as_u64()?), record))
    };
    records.filter_map(record).collect()
}

/// Returns the first difference between a run and one rank, in the metrics and the sample.
pub fn difference(run: &Path, one_rank: &Path) -> Option<String> {
    let (own, expected) = (metrics(run), metrics(one_rank));
    if own.keys().ne(expected.keys()) {
        return Some(format!(
            "the records are {:?}, and {:?} on one rank",
            own.keys(),
            expected.keys()
        ));
    }
    let differ = own
        .iter()
        .zip(expected.values())
        .find_map(|(((kind, step), own), expected)| {
            let lines = within(expected, own, bound).err()?;
            let first = lines.lines().next()?;
            Some(format!("{kind} {step}: {first}"))
        });
    let sample = |run: &Path| fs::read(run.join("sample.txt")).ok();
    let samples = (sample(run), sample(one_rank));
    differ.or_else(|| (samples.0 != samples.1).then(|| "the samples differ".into()))
}

/// Returns the bound of a metric. Counts of zeros have no bound, since the order of a sum decides whether it is
/// exactly 0.
fn bound(path: &str) -> f64 {
    match path.split('/').any(|key| key == "zeros") {
        true => f64::INFINITY,
        false => RELATIVE,
    }
}

/// Returns the first difference in the output of `checkpoint diff` that rounding does not explain.
pub fn of_checkpoints(output: &str) -> Option<String> {
    let is_wrong = |line: &&str| {
        if line.starts_with("only in ") {
            return true;
        }
        // Objects hold the state of the run, such as counters. Their metrics are compared above.
        if !line.starts_with("differs ") || line.contains(" object ") {
            return false;
        }
        let largest = line.split_once("by at most ").and_then(|(_, rest)| {
            let number = rest.split_whitespace().next()?;
            number.parse::<f64>().ok()
        });
        !largest.is_some_and(|largest| largest <= ABSOLUTE)
    };
    output
        .lines()
        .find(is_wrong)
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    const RECORDS: &str = "{\"kind\":\"step\",\"step\":1,\"loss\":5.5,\"skipped\":false}\n\
                           {\"kind\":\"experts\",\"step\":1,\"layers\":[{\"max\":1.5}]}\n\
                           {\"kind\":\"run\",\"version\":2}\n";

    fn compared(own: &str) -> Option<String> {
        let folder = TempDir::new("fuzz-compare").unwrap();
        folder.write("own/metrics.jsonl", own);
        folder.write("one/metrics.jsonl", RECORDS);
        difference(&folder.path().join("own"), &folder.path().join("one"))
    }

    #[test]
    fn rounding_passes_and_everything_else_is_found() {
        assert_eq!(compared(RECORDS), None);
        assert_eq!(compared(&RECORDS.replace("5.5", "5.50000000001")), None);
        for (from, to, says) in [
            ("5.5", "5.5001", "step 1: loss: 5.5001, expected 5.5"),
            ("5.5", "\"NaN\"", "step 1: loss: \"NaN\", expected 5.5"),
            ("false", "true", "step 1: skipped: true, expected false"),
            ("1.5", "1.25", "experts 1: layers/0/max: 1.25, expected 1.5"),
            ("\"loss\":5.5,", "", "step 1: loss: null, expected 5.5"),
            ("experts", "other", "the records are "),
        ] {
            let found = compared(&RECORDS.replace(from, to)).unwrap_or_default();
            assert!(found.starts_with(says), "{to}: {found}");
        }
    }

    #[test]
    fn a_checkpoint_may_differ_by_rounding_alone() {
        let differs = |absolute: &str| {
            let line = format!(
                "differs    model/a: 3 of 8 elements differ, by at most {absolute} absolute, 1e-2 relative"
            );
            of_checkpoints(&format!("A  x\n{line}\nthe same: 4 tensors\n"))
        };
        assert_eq!(differs("1.000e-12"), None);
        assert!(
            differs("1.000e-3").is_some_and(|line| line.starts_with("differs model/a: 3 of 8"))
        );
        assert!(differs("inf").is_some());
        assert_eq!(of_checkpoints("differs    object state\n"), None);
        assert_eq!(
            of_checkpoints("only in A  model/b\n").as_deref(),
            Some("only in A model/b")
        );
        let shape = "differs    model/a: [2, 3] in A, [3, 2] in B\n";
        assert!(of_checkpoints(shape).is_some());
    }
}
