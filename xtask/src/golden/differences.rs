//! The differences between recorded and found results.

use serde_json::Value;

/// The most differences that a message lists.
const SHOWN: usize = 20;

/// Compares to the bit.
pub fn exact(recorded: &Value, found: &Value) -> Result<(), String> {
    within(recorded, found, |_| 0.0)
}

/// Compares numbers up to a relative bound, which `bound` gives for the first key of a path, and everything else exactly.
///
/// # Errors
///
/// The paths that differ, with both values.
pub fn within(recorded: &Value, found: &Value, bound: impl Fn(&str) -> f64) -> Result<(), String> {
    let mut differences = vec![];
    compare("", recorded, found, &bound, &mut differences);
    match differences.len() {
        0 => Ok(()),
        count => {
            let shown = &differences[..count.min(SHOWN)];
            Err(format!("{count} results differ\n{}", shown.join("\n")))
        }
    }
}

fn compare(
    path: &str,
    recorded: &Value,
    found: &Value,
    bound: &impl Fn(&str) -> f64,
    differences: &mut Vec<String>,
) {
    let below = |key: &str| match path {
        "" => key.to_owned(),
        _ => format!("{path}/{key}"),
    };
    match (recorded, found) {
        (Value::Object(recorded), Value::Object(found)) => {
            for (key, recorded) in recorded {
                let found = found.get(key).unwrap_or(&Value::Null);
                compare(&below(key), recorded, found, bound, differences);
            }
            let new = found.keys().filter(|key| !recorded.contains_key(*key));
            differences.extend(new.map(|key| format!("{}: not recorded", below(key))));
        }
        (Value::Array(recorded), Value::Array(found)) if recorded.len() == found.len() => {
            for (index, (recorded, found)) in recorded.iter().zip(found).enumerate() {
                compare(
                    &below(&index.to_string()),
                    recorded,
                    found,
                    bound,
                    differences,
                );
            }
        }
        (recorded, found) => {
            let first = path.split('/').next().unwrap_or_default();
            if recorded != found && !are_close(recorded, found, bound(first)) {
                differences.push(format!("{path}: {found}, recorded {recorded}"));
            }
        }
    }
}

fn are_close(recorded: &Value, found: &Value, bound: f64) -> bool {
    let numbers = recorded.as_f64().zip(found.as_f64());
    numbers.is_some_and(|(a, b)| (a - b).abs() <= bound * a.abs().max(b.abs()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_difference_has_its_path() {
        let recorded = json!({ "a": { "loss": [1.0, 2.0] }, "b": "x" });
        let found = json!({ "a": { "loss": [1.0, 2.5] }, "c": 1 });
        let error = exact(&recorded, &found).unwrap_err();
        assert_eq!(
            error,
            "3 results differ\na/loss/1: 2.5, recorded 2.0\nb: null, recorded \"x\"\nc: not recorded"
        );
        assert_eq!(exact(&recorded, &recorded), Ok(()));
    }

    #[test]
    fn numbers_may_differ_up_to_the_bound_of_their_first_key() {
        let recorded = json!({ "a": [1.0], "b": [1.0] });
        let found = json!({ "a": [1.001], "b": [1.001] });
        let bound = |key: &str| if key == "a" { 0.01 } else { 1e-6 };
        let error = within(&recorded, &found, bound).unwrap_err();
        assert_eq!(error, "1 results differ\nb/0: 1.001, recorded 1.0");
        let shorter = json!({ "a": [], "b": [1.0] });
        assert!(within(&recorded, &shorter, |_| 1.0).is_err());
    }
}
