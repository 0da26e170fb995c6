//! The conditions under which a setting has a meaning, and the settings that a flag drops.

use std::fmt;

use serde_json::Value as Json;
use toml::{Table, Value};

use super::{Settings, get, remove};
use crate::origins::dotted;

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
    /// Reads a condition of `needs`, such as `pipeline > 1`, `zero_stage = 0` or `sequence_parallel`. `or` separates
    /// alternatives.
    pub fn needed(text: &str, table: &str) -> Self {
        Self::read(text, table, true)
    }

    /// Reads a condition of `follows`. A name alone is a setting that must not change.
    pub fn followed(text: &str, table: &str) -> Self {
        Self::read(text, table, false)
    }

    fn read(text: &str, table: &str, is_needed: bool) -> Self {
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

/// Whether a dotted key is one of some keys.
type KeyTest<'a> = &'a dyn Fn(&str) -> bool;

/// A setting of a recipe whose condition the command line has broken.
#[derive(Debug, PartialEq)]
pub struct DroppedSetting {
    /// The dotted key.
    pub path: String,
    /// Why it was dropped, and what.
    pub note: String,
    /// Whether it had another value than its default.
    pub was_set: bool,
}

impl Settings {
    /// Drops the settings of a recipe whose condition the `changed` keys have broken, except settings that are `kept`.
    /// Returns the settings that were dropped.
    pub fn drop_dependants(
        &self,
        before: &Table,
        recipe: &mut Table,
        (changed, kept): (KeyTest<'_>, KeyTest<'_>),
    ) -> Vec<DroppedSetting> {
        let mut dropped: Vec<DroppedSetting> = vec![];
        loop {
            let is_dropped = |path: &str| dropped.iter().any(|of| of.path == path);
            let is_broken = |condition: &&Condition| {
                let holds = |(key, test): &(String, Test)| {
                    let [before, now] = [before, &*recipe].map(|of| self.value(of, key));
                    test.holds(&before, &now)
                };
                let is_touched = condition.keys().any(|key| changed(key) || is_dropped(key));
                is_touched && !condition.any.iter().any(holds)
            };
            let broken = self.all().find_map(|setting| {
                let path = &setting.path;
                let condition = setting.conditions.iter().find(is_broken)?;
                let is_own = !kept(path) && get(recipe, path).is_some() && !is_dropped(path);
                is_own.then_some((path, condition))
            });
            let Some((path, condition)) = broken else {
                return dropped;
            };
            let (path, why) = match condition.is_needed {
                true => (path.clone(), format!("requires {condition}")),
                false => (path.clone(), format!("depends on {condition}")),
            };
            let note = format!("{path} of the recipe is dropped: it {why}");
            let default = self.find(&path).and_then(|it| it.default.clone());
            let was_set = self.value(recipe, &path) != default.unwrap_or(Json::Null);
            remove(recipe, &path);
            dropped.push(DroppedSetting {
                path,
                note,
                was_set,
            });
        }
    }

    /// The value of a key in a recipe, or its default.
    fn value(&self, recipe: &Table, path: &str) -> Json {
        let given = get(recipe, path).and_then(|value: &Value| serde_json::to_value(value).ok());
        let default = || self.find(path).and_then(|setting| setting.default.clone());
        given.or_else(default).unwrap_or(Json::Null)
    }
}
