//! Implements `--set`: keys of a recipe on the command line.

use std::str::FromStr;

use clap::Args;
use toml::{Table, Value};

use crate::error::Error;
use crate::settings::keys::dotted;
use crate::settings::{Given, SettingFlags, Settings, from_toml};

/// The flag --set, which sets any key of a recipe.
#[derive(Args, Clone, Debug, Default)]
pub struct SetArgs {
    /// Set a key of the recipe, as in model.hidden=256, train.clip=0.5 or model.family=qwen3. The value is written as
    /// for the flag of this key, or as a TOML value. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<KeyValue>,
}

/// Key and the text of its value.
#[derive(Clone, Debug, PartialEq)]
struct KeyValue {
    key: String,
    text: String,
}

impl FromStr for KeyValue {
    type Err = String;

    fn from_str(argument: &str) -> Result<Self, String> {
        let (key, text) = argument
            .split_once('=')
            .ok_or_else(|| invalid("no `=`".into()))?;
        let (key, text) = (key.trim(), text.trim());
        if let Err(error) = format!("{key} = 0").parse::<Table>() {
            return Err(invalid(error.message().into()));
        }
        let key = key.into();
        match text {
            "" => Err(invalid("no value".into())),
            text => Ok(Self {
                key,
                text: text.into(),
            }),
        }
    }
}

fn invalid(why: String) -> String {
    format!("expected KEY=VALUE, as in model.hidden=256: {why}")
}

/// Returns whether a value can only be a string.
fn is_word(value: &str) -> bool {
    let first = value.chars().next();
    first.is_some_and(|first| first.is_alphabetic() || "./~".contains(first))
        && !value.contains(['"', '\'', '[', ']', '{', '}', '=', '#', ',', '\n'])
}

impl SetArgs {
    /// Checks that keys are set only if there is a recipe.
    ///
    /// # Errors
    /// Returns an error if keys are set without the recipe. The error names the flag `recipe`.
    pub fn need(&self, recipe: &str) -> Result<(), Error> {
        if self.set.is_empty() {
            Ok(())
        } else {
            Err(format!("--set sets keys of a recipe: name one with {recipe}").into())
        }
    }

    /// Returns all keys with their values.
    ///
    /// # Errors
    /// Returns an error for an unknown key or an invalid value.
    pub fn given(&self, settings: &Settings) -> Result<SettingFlags, Error> {
        let invalid = |error: String| -> Error { format!("invalid --set: {error}").into() };
        let mut given = vec![];
        for KeyValue { key, text } in &self.set {
            let value = value(settings, key, text).map_err(invalid)?;
            // Parsed as TOML, because keys may be quoted.
            let mut keys: Table = format!("{key} = 0").parse()?;
            let Given::Value(value) = value else {
                given.push((key.clone(), value));
                continue;
            };
            replace_innermost(&mut keys, value);
            if keys.contains_key("base") {
                return Err(invalid("base is a key of a recipe file".into()));
            }
            let checked = settings.check_keys(&keys);
            checked.map_err(|error| invalid(error.to_string()))?;
            flatten(settings, "", keys, &mut given);
        }
        Ok(SettingFlags::new(given))
    }
}

/// Parses a value as TOML, or else in the form of the key's flag.
fn value(settings: &Settings, key: &str, text: &str) -> Result<Given, String> {
    let setting = settings.find(key);
    if let Some(value) = from_toml(text) {
        // A number such as 5 is also a valid text, for example of a prompt.
        let is_text = setting.is_some_and(|setting| setting.forms.is_text_only());
        let value = if is_text && !value.is_str() {
            text.into()
        } else {
            value
        };
        return Ok(Given::Value(value));
    }
    match setting.map(|setting| setting.parser().parse(text)) {
        Some(Ok(given)) => Ok(given),
        // The type of the value is checked later.
        _ if is_word(text) => Ok(Given::Value(text.into())),
        Some(Err(error)) => Err(format!("{key}={text}: {error}, or a value in TOML")),
        None => Err(format!("{key}={text}: expected a value in TOML")),
    }
}

/// Replaces the value of the only key in the innermost table.
fn replace_innermost(table: &mut Table, value: Value) {
    match table.iter_mut().next() {
        Some((_, Value::Table(inner))) => replace_innermost(inner, value),
        Some((_, of)) => *of = value,
        None => {}
    }
}

/// Adds the keys of a table, each with its path. The keys of a variant, or of a table with arbitrary keys, stay in
/// their table.
fn flatten(settings: &Settings, path: &str, table: Table, given: &mut Vec<(String, Given)>) {
    for (key, value) in table {
        let path = dotted(path, &key);
        let is_table = |path: &str| settings.find(path).is_some_and(|it| it.has_keys());
        match value {
            Value::Table(inner) if !inner.is_empty() && is_table(&path) => {
                flatten(settings, &path, inner, given);
            }
            value => given.push((path, Given::Value(value))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Families;

    fn given(arguments: &[&str]) -> Result<SettingFlags, Error> {
        let set = arguments.iter().map(|text| text.parse());
        let set = set.collect::<Result<_, _>>()?;
        SetArgs { set }.given(&Settings::of(&Families::transformers()))
    }

    #[test]
    fn values_are_toml_or_those_of_the_flags() {
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
            (
                "memory.offload.activations=2GiB",
                "memory.offload.activations = 2147483648",
            ),
            (
                "lora.target_modules=a,b",
                "lora.target_modules = ['a', 'b']",
            ),
            ("train.loss_scale=none", "train.loss_scale = 'none'"),
        ] {
            let given = given(&[text]).unwrap();
            assert_eq!(
                given.table(&Table::new()),
                wanted.parse().unwrap(),
                "{text}"
            );
        }
        let given = given(&["train.ema=none", "parallel.virtual_stages=none"]).unwrap();
        let unset: Vec<_> = given.unset().collect();
        assert_eq!(unset, ["parallel.virtual_stages", "train.ema"]);
    }

    #[test]
    fn what_is_no_key_and_value_is_refused() {
        for text in ["model.hidden", "=3", "model.hidden=", "a b=3"] {
            let error = text.parse::<KeyValue>().unwrap_err();
            assert!(error.starts_with("expected KEY=VALUE"), "{text}: {error}");
        }
        for (text, says) in [
            ("train.steps=[1", "train.steps=[1: expected an integer"),
            ("train.clip=1\nb=2", "expected a number"),
            ("train.step=3", "did you mean train.steps?"),
            ("base='none'", "base is a key of a recipe file"),
        ] {
            let error = given(&[text]).unwrap_err().to_string();
            assert!(
                error.starts_with("invalid --set: ") && error.contains(says),
                "{error}"
            );
        }
    }
}
