//! Compares two JSON values.

use serde_json::Value;

/// The maximum number of differences in a message.
const SHOWN: usize = 20;

/// The smallest magnitude for a relative bound. Smaller values use this magnitude.
const SMALLEST: f64 = 1e-3;

/// Compares numbers up to a relative bound, and all other values exactly. `bound` returns the bound of a path, such
/// as `layers/0/max`.
///
/// # Errors
///
/// Returns a line for each path that differs, with both values.
pub fn within(expected: &Value, found: &Value, bound: impl Fn(&str) -> f64) -> Result<(), String> {
    let mut differences = vec![];
    compare("", expected, found, &bound, &mut differences);
    let more = differences.len().saturating_sub(SHOWN);
    if more > 0 {
        differences.truncate(SHOWN);
        differences.push(format!("and {more} more"));
    }
    match differences.is_empty() {
        true => Ok(()),
        false => Err(differences.join("\n")),
    }
}

fn compare(
    path: &str,
    expected: &Value,
    found: &Value,
    bound: &impl Fn(&str) -> f64,
    differences: &mut Vec<String>,
) {
    let below = |key: &str| match path {
        "" => key.to_owned(),
        _ => format!("{path}/{key}"),
    };
    match (expected, found) {
        (Value::Object(expected), Value::Object(found)) => {
            for (key, expected) in expected {
                let found = found.get(key).unwrap_or(&Value::Null);
                compare(&below(key), expected, found, bound, differences);
            }
            let new = found.keys().filter(|key| !expected.contains_key(*key));
            differences.extend(new.map(|key| format!("{}: not expected", below(key))));
        }
        (Value::Array(expected), Value::Array(found)) if expected.len() == found.len() => {
            for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
                compare(
                    &below(&index.to_string()),
                    expected,
                    found,
                    bound,
                    differences,
                );
            }
        }
        (expected, found) => {
            if expected != found && !are_close(expected, found, bound(path)) {
                differences.push(format!("{path}: {found}, expected {expected}"));
            }
        }
    }
}

fn are_close(expected: &Value, found: &Value, bound: f64) -> bool {
    let numbers = expected.as_f64().zip(found.as_f64());
    numbers.is_some_and(|(a, b)| (a - b).abs() <= bound * a.abs().max(b.abs()).max(SMALLEST))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_difference_has_its_path() {
        let expected = json!({ "a": { "loss": [1.0, 2.0] }, "b": "x" });
        let found = json!({ "a": { "loss": [1.0, 2.5] }, "c": 1 });
        let error = within(&expected, &found, |_| 0.0).unwrap_err();
        let lines = "a/loss/1: 2.5, expected 2.0\nb: null, expected \"x\"\nc: not expected";
        assert_eq!(error, lines);
        assert_eq!(within(&expected, &expected, |_| 0.0), Ok(()));
        let [zeros, ones] = [0, 1].map(|value| json!(vec![value; 23]));
        let error = within(&zeros, &ones, |_| 0.0).unwrap_err();
        assert!(
            error.ends_with("\n19: 1, expected 0\nand 3 more"),
            "{error}"
        );
    }

    #[test]
    fn numbers_may_differ_up_to_the_bound_of_their_path() {
        let expected = json!({ "a": [1.0], "b": [1.0] });
        let found = json!({ "a": [1.001], "b": [1.001] });
        let bound = |path: &str| if path == "a/0" { 0.01 } else { 1e-6 };
        let error = within(&expected, &found, bound).unwrap_err();
        assert_eq!(error, "b/0: 1.001, expected 1.0");
        let shorter = json!({ "a": [], "b": [1.0] });
        assert!(within(&expected, &shorter, |_| 1.0).is_err());
    }
}
