//! The conditions under which a setting has a meaning.

use std::fmt;

use serde_json::Value as Json;

use super::keys::dotted;

/// A condition on other settings, one of which must fulfil it.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    any: Vec<(String, Test)>,
    /// Whether the setting has no meaning without it.
    pub is_needed: bool,
}

/// What another setting must be.
#[derive(Clone, Debug, PartialEq)]
enum Test {
    /// As before.
    Unchanged,
    /// True, or a value.
    Set,
    Above(f64),
    Is(String),
}

impl Condition {
    /// Reads a condition of `needs`.
    pub fn needed(text: &str, table: &str) -> Self {
        Self::new(text, table, true)
    }

    /// Reads a condition of `follows`.
    pub fn followed(text: &str, table: &str) -> Self {
        Self::new(text, table, false)
    }

    /// Reads a condition such as `pipeline > 1`, `zero_stage = 0` or `sequence_parallel`. `or` separates alternatives. A name
    /// alone in `follows` is a setting that must not change.
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

    /// Whether the condition holds for the values that a setting had before and has now.
    pub fn holds(&self, values: impl Fn(&str) -> [Json; 2]) -> bool {
        self.any.iter().any(|(key, test)| {
            let [before, now] = values(key);
            test.holds(&before, &now)
        })
    }
}

impl Test {
    /// Whether it holds for the value that the setting has now, and had before.
    fn holds(&self, before: &Json, now: &Json) -> bool {
        match self {
            Self::Unchanged => before == now,
            Self::Set => !matches!(now, Json::Null | Json::Bool(false)),
            Self::Above(bound) => now.as_f64().is_some_and(|now| now > *bound),
            Self::Is(value) => now.as_str().map_or_else(|| now.to_string(), String::from) == *value,
        }
    }
}

/// As in a recipe: `parallel.pipeline > 1`.
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
