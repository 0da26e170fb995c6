//! Reads the metrics of a run from its folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

/// The kinds of records that are compared.
const KINDS: [&str; 4] = ["step", "held_out", "experts", "expert_load"];

/// Fields of the records that must be equal.
const FIELDS: [&str; 6] = [
    "loss",
    "gradient_norm",
    "learning_rate",
    "skipped",
    "loss_scale",
    "layers",
];

/// Records by kind and step. A resumed run may have written a step twice: the last record counts.
#[derive(Debug, Default, PartialEq)]
pub struct RunMetrics(BTreeMap<(String, u64), Vec<Value>>);

impl RunMetrics {
    /// Returns the metrics of a run. They are empty if the file does not exist yet.
    pub fn of(run: &Path) -> Self {
        Self::parse(&fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default())
    }

    /// Parses the records. Truncated lines and records of other kinds are skipped.
    fn parse(text: &str) -> Self {
        let mut numbers = BTreeMap::new();
        for record in text
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        {
            let kind = record["kind"].as_str().filter(|kind| KINDS.contains(kind));
            let (Some(kind), Some(step)) = (kind, record["step"].as_u64()) else {
                continue;
            };
            let values = FIELDS.map(|field| record[field].clone()).to_vec();
            numbers.insert((kind.to_owned(), step), values);
        }
        Self(numbers)
    }

    /// Returns the number of steps.
    pub fn steps(&self) -> usize {
        self.0.keys().filter(|(kind, _)| kind == "step").count()
    }

    /// Returns the first number that differs from `whole`.
    pub fn differ_from(&self, whole: &Self) -> Option<String> {
        self.0.iter().find_map(|(at, values)| {
            let expected = whole.0.get(at)?;
            (values != expected).then(|| {
                let ((kind, step), fields) = (at, FIELDS.join(", "));
                let show = |values: &[Value]| {
                    let values = values.iter().map(Value::to_string);
                    values.collect::<Vec<_>>().join(", ")
                };
                let (found, expected) = (show(values), show(expected));
                format!(
                    "{kind} {step}: {fields} are {found}, and {expected} in the undisturbed run"
                )
            })
        })
    }

    /// Returns the first record of `whole` that is missing in this run.
    pub fn lacks(&self, whole: &Self) -> Option<String> {
        let missing = whole.0.keys().find(|at| !self.0.contains_key(*at));
        missing.map(|(kind, step)| format!("there is no {kind} {step}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_of_a_step_counts_and_torn_lines_do_not() {
        let whole = RunMetrics::parse(
            "{\"kind\":\"version\",\"version\":2}\n\
             {\"kind\":\"step\",\"step\":0,\"loss\":5.5}\n{\"kind\":\"step\",\"step\":1,\"loss\":5.25}\n\
             {\"kind\":\"held_out\",\"step\":2,\"loss\":5.0}\n",
        );
        let resumed = RunMetrics::parse(
            "{\"kind\":\"step\",\"step\":0,\"loss\":5.5}\n{\"kind\":\"step\",\"step\":1,\"loss\":1}\n\
             {\"kind\":\"step\",\"st\n{\"kind\":\"resumed\",\"step\":1}\n\
             {\"kind\":\"step\",\"step\":1,\"loss\":5.25}\n{\"kind\":\"step\"",
        );
        assert_eq!((whole.steps(), resumed.steps()), (2, 2));
        assert_eq!(resumed.differ_from(&whole), None);
        assert_eq!(resumed.lacks(&whole), Some("there is no held_out 2".into()));
        let other = RunMetrics::parse("{\"kind\":\"step\",\"step\":1,\"loss\":5.5}");
        let told = other.differ_from(&whole).unwrap();
        assert!(told.starts_with("step 1: loss, "), "{told}");
        assert!(told.contains("5.5") && told.contains("5.25"), "{told}");
    }
}
