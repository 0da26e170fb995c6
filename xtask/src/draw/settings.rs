//! The settings of a recipe, by key.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

/// The settings of a recipe: TOML values by dotted key, as in `model.moe.experts = 4`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, String>);

impl Settings {
    /// Sets a key to a number, a boolean, or a value in TOML.
    pub fn set(&mut self, key: &str, value: impl Display) {
        self.0.insert(key.into(), value.to_string());
    }

    /// Sets a key to a string.
    pub fn set_text(&mut self, key: &str, value: &str) {
        self.set(key, format_args!("{value:?}"));
    }

    /// Returns the value of a key in TOML.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Returns the value of a key, or `None` if it is not an integer.
    pub fn number(&self, key: &str) -> Option<usize> {
        self.get(key)?.parse().ok()
    }

    /// Returns whether a key, or a key of a table, is set.
    pub fn has(&self, key: &str) -> bool {
        self.0.keys().any(|other| is_within(other, key))
    }

    /// Returns whether a key has this value, given without quotes.
    pub fn is(&self, key: &str, value: &str) -> bool {
        self.get(key)
            .is_some_and(|own| own.trim_matches('"') == value)
    }

    /// Returns whether `setting` holds: a key or a table that is set, or `KEY=VALUE`.
    pub fn matches(&self, setting: &str) -> bool {
        match setting.split_once('=') {
            Some((key, value)) => self.is(key, value),
            None => self.has(setting),
        }
    }

    /// Removes a key, or all keys of a table.
    pub fn remove(&mut self, key: &str) {
        self.0.retain(|other, _| !is_within(other, key));
    }

    /// Returns all keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns the recipe as a complete TOML file.
    pub fn to_toml(&self) -> String {
        let mut text = String::from("base = \"none\"\n");
        let mut table = "";
        for (key, value) in &self.0 {
            let (top, rest) = key.split_once('.').unwrap_or(("", key));
            if top != table {
                table = top;
                writeln!(text, "\n[{top}]").expect("writing to a String cannot fail");
            }
            writeln!(text, "{rest} = {value}").expect("writing to a String cannot fail");
        }
        text
    }
}

/// Returns whether `key` is `table` or lies in the table of this name.
fn is_within(key: &str, table: &str) -> bool {
    key.strip_prefix(table)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_written_in_their_tables() {
        let mut settings = Settings::default();
        settings.set("train.steps", 2);
        settings.set_text("model.family", "gpt2");
        settings.set("model.moe.experts", 4);
        settings.set("model.moe_other", true);
        assert_eq!(
            settings.to_toml(),
            "base = \"none\"\n\n[model]\nfamily = \"gpt2\"\nmoe.experts = 4\nmoe_other = true\n\n[train]\nsteps = 2\n"
        );
        assert!(settings.has("model.moe") && !settings.has("model.mo"));
        assert_eq!(settings.number("train.steps"), Some(2));
        assert!(settings.matches("model.family=gpt2") && settings.matches("train"));
        assert!(!settings.matches("model.family=gpt") && !settings.matches("data"));
        settings.remove("model.moe");
        let keys: Vec<_> = settings.keys().collect();
        assert_eq!(keys, ["model.family", "model.moe_other", "train.steps"]);
    }
}
