//! Conditions under which a setting has an effect.

use std::fmt;

use serde_json::Value as Json;

use super::keys::dotted;

/// Condition on other settings. It holds if one of its alternatives holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    any: Vec<(String, Test)>,
    /// Whether the setting has no effect without the condition.
    pub is_needed: bool,
}

/// Required state of another setting.
#[derive(Clone, Debug, PartialEq)]
enum Test {
    /// The value did not change.
    Unchanged,
    /// The value is true, or any other value except false and none.
    Set,
    Above(f64),
    Is(String),
}

impl Condition {
    /// Parses a condition of `needs`.
    pub fn needed(text: &str, table: &str) -> Self {
        Self::new(text, table, true)
    }

    /// Parses a condition of `follows`.
    pub fn followed(text: &str, table: &str) -> Self {
        Self::new(text, table, false)
    }

    /// Parses a condition such as `pipeline > 1`, `zero_stage = 0` or `sequence_parallel`. `or` separates
    /// alternatives. In `follows`, a name alone is a setting that must not change.
    fn new(text: &str, table: &str, is_needed: bool) -> Self {
        let any = text.split(" or ").map(|text| {
            let words: Vec<_> = text.split_whitespace().collect();
            let (name, test) = match words[..] {
                [name, ">", bound] => (name, Test::Above(bound.parse().unwrap_or(f64::NAN))),
                [name, "=", value] => (name, Test::Is(value.into())),
                [name, "set"] => (name, Test::Set),
                [name] if is_needed => (name, Test::Set),
                [name] => (name, Test::Unchanged),
                // A test checks that the key of each condition exists.
                _ => (text, Test::Unchanged),
            };
            let key = match name.contains('.') {
                true => name.into(),
                false => dotted(table, name),
            };
            (key, test)
        });
        Self {
            any: any.collect(),
            is_needed,
        }
    }

    /// Returns the keys of the other settings.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.any.iter().map(|(key, _)| &key[..])
    }

    /// Returns whether the condition holds. `values` returns the previous and the current value of a setting.
    pub fn holds(&self, values: impl Fn(&str) -> [Json; 2]) -> bool {
        self.any.iter().any(|(key, test)| {
            let [before, now] = values(key);
            test.holds(&before, &now)
        })
    }
}

impl Test {
    /// Returns whether the test holds for the current and the previous value of the setting.
    fn holds(&self, before: &Json, now: &Json) -> bool {
        match self {
            Self::Unchanged => before == now,
            Self::Set => !matches!(now, Json::Null | Json::Bool(false)),
            Self::Above(bound) => now.as_f64().is_some_and(|now| now > *bound),
            Self::Is(value) => now.as_str().map_or_else(|| now.to_string(), String::from) == *value,
        }
    }
}

/// Writes the condition with dotted keys: `parallel.pipeline > 1`.
impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let any = self.any.iter().map(|(key, test)| match test {
            Test::Unchanged | Test::Set => key.clone(),
            Test::Above(bound) => format!("{key} > {bound}"),
            Test::Is(value) => format!("{key} = {value}"),
        });
        f.write_str(&any.collect::<Vec<_>>().join(" or "))
    }
}
