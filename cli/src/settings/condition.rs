//! The conditions under which a setting has a meaning, and the settings that a flag drops.

use std::fmt;

use serde_json::Value as Json;
use toml::{Table, Value};

use super::{Settings, get, remove};
use crate::origins::dotted;

/// A condition on another setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    /// The dotted key of the other setting.
    pub key: String,
    test: Test,
    /// Whether the setting has no meaning without it.
    pub is_needed: bool,
}

/// What the other setting must be.
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
    /// Reads a condition of `needs`, such as `pipeline > 1`, `zero_stage = 0` or `sequence_parallel`.
    pub fn needed(text: &str, table: &str) -> Self {
        Self::read(text, table, true)
    }

    /// Reads a condition of `follows`. A name alone is a setting that must not change.
    pub fn followed(text: &str, table: &str) -> Self {
        Self::read(text, table, false)
    }

    fn read(text: &str, table: &str, is_needed: bool) -> Self {
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
        Self {
            key,
            test,
            is_needed,
        }
    }

    /// Whether it holds for the value that the setting has now, and had before.
    fn holds(&self, before: &Json, now: &Json) -> bool {
        match &self.test {
            Test::Unchanged => before == now,
            Test::Set => !matches!(now, Json::Null | Json::Bool(false)),
            Test::Above(bound) => now.as_f64().is_some_and(|now| now > *bound),
            Test::Is(value) => now.as_str().map_or_else(|| now.to_string(), String::from) == *value,
        }
    }
}

/// As in a recipe: `parallel.pipeline > 1`.
impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.test {
            Test::Unchanged | Test::Set => f.write_str(&self.key),
            Test::Above(bound) => write!(f, "{} > {bound}", self.key),
            Test::Is(value) => write!(f, "{} = {value}", self.key),
        }
    }
}

impl Settings {
    /// Drops the settings of a recipe whose condition the keys in `given` have broken, except settings that are
    /// given too. Returns the keys that were dropped.
    pub fn drop_dependants(
        &self,
        before: &Table,
        recipe: &mut Table,
        given: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let mut dropped: Vec<String> = vec![];
        loop {
            let broken = self.all().find(|setting| {
                let path = &setting.path;
                let is_broken = setting.conditions.iter().any(|condition| {
                    let is_touched = given(&condition.key) || dropped.contains(&condition.key);
                    let [before, now] = [before, &*recipe].map(|of| self.value(of, &condition.key));
                    is_touched && !condition.holds(&before, &now)
                });
                is_broken && !given(path) && get(recipe, path).is_some() && !dropped.contains(path)
            });
            let Some(path) = broken.map(|setting| setting.path.clone()) else {
                return dropped;
            };
            remove(recipe, &path);
            dropped.push(path);
        }
    }

    /// The value of a key in a recipe, or its default.
    fn value(&self, recipe: &Table, path: &str) -> Json {
        let given = get(recipe, path).and_then(|value: &Value| serde_json::to_value(value).ok());
        let default = || self.find(path).and_then(|setting| setting.default.clone());
        given.or_else(default).unwrap_or(Json::Null)
    }
}
