//! `--set`: keys of a recipe on the command line.

use std::str::FromStr;

use clap::Args;
use toml::Table;

use crate::error::Error;
use crate::retired;
use crate::settings::{Settings, merge};

/// The flag for any key of a recipe.
#[derive(Args, Clone, Debug, Default)]
pub struct SetArgs {
    /// Set a key of the recipe, as in model.hidden=256, train.clip=0.5 or model.family=qwen3: any key, with a value in
    /// TOML. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<Setting>,
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq)]
struct Setting(Table);

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = |why: &str| {
            format!("expected KEY=VALUE with a value in TOML, as in model.hidden=256{why}")
        };
        let (key, value) = text.split_once('=').ok_or_else(|| invalid(""))?;
        let (key, value) = (key.trim(), value.trim());
        let parse = |key: &str, value: &str| format!("{key} = {value}").parse::<Table>();
        // The shell takes the quotes of a string away.
        let quoted = toml::Value::from(value).to_string();
        let value = match parse("x", value) {
            Err(_) if is_word(value) => &quoted,
            Ok(table) if table.len() > 1 => return Err(invalid("")),
            _ => value,
        };
        let parsed = parse(key, value);
        let parsed = parsed.map_err(|error| invalid(&format!(": {}", error.message())));
        Ok(Self(parsed?))
    }
}

/// Whether a value can only be meant as a string.
fn is_word(value: &str) -> bool {
    let first = value.chars().next();
    first.is_some_and(|first| first.is_alphabetic() || "./~".contains(first))
        && !value.contains(['"', '\'', '[', ']', '{', '}', '=', '#', ',', '\n'])
}

impl SetArgs {
    /// Checks that keys are set of a recipe only.
    ///
    /// # Errors
    /// Keys without the recipe, which the flag `recipe` names.
    pub fn need(&self, recipe: &str) -> Result<(), Error> {
        if self.set.is_empty() {
            Ok(())
        } else {
            Err(format!("--set sets keys of a recipe: name one with {recipe}").into())
        }
    }

    /// All keys, as the tables of a recipe.
    ///
    /// # Errors
    /// Retired keys with their successors, and keys that no recipe has.
    pub fn table(&self, settings: &Settings) -> Result<Table, Error> {
        let mut table = Table::new();
        for Setting(setting) in &self.set {
            retired::check_recipe(setting)?;
            if setting.contains_key("base") {
                return Err("invalid --set: base is a key of a recipe file".into());
            }
            settings
                .check_keys(setting)
                .map_err(|error| format!("invalid --set: {error}"))?;
            merge(Some(settings.root()), &mut table, setting);
        }
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_toml_and_words_are_strings() {
        for (text, wanted) in [
            ("model.hidden=256", "model.hidden = 256"),
            ("train.clip = 0.5", "train.clip = 0.5"),
            ("model.family=qwen3", "model.family = 'qwen3'"),
            ("data.path=./a/b.txt", "data.path = './a/b.txt'"),
            ("model.tied=true", "model.tied = true"),
            (
                "train.schedule={wsd={decay_steps=3}}",
                "train.schedule.wsd.decay_steps = 3",
            ),
            ("sample.prompt='a = b'", "sample.prompt = 'a = b'"),
        ] {
            assert_eq!(text.parse(), Ok(Setting(wanted.parse().unwrap())), "{text}");
        }
        for text in [
            "model.hidden",
            "=3",
            "model.hidden=",
            "a=[1",
            "a b=3",
            "a=1\nb=2",
        ] {
            let error = text.parse::<Setting>().unwrap_err();
            assert!(error.starts_with("expected KEY=VALUE"), "{text}: {error}");
        }
    }
}
