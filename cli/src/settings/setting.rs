//! Setting: a tree of keys that is read from the schema of a type.

use serde_json::Value as Json;
use toml::{Table, Value};

use super::condition::Condition;
use super::keys::{dotted, json_at};
use super::schema::{Schema, branches, plain, variant};
use super::value::{Forms, ValueParser};

/// Rule for changes of a setting in a resumed run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeRule {
    /// The setting may change only if the user allows it.
    Fixed,
    /// The setting may never change, because it determines which tensors a checkpoint has.
    Never,
    /// The setting may change.
    MayDiffer,
    /// The setting may change, except in a deterministic run, because it changes the order of summation.
    OrderOfSums,
}

/// Key of a recipe: a value, a table of further keys, or both.
#[derive(Clone, Debug, Default)]
pub struct Setting {
    /// The dotted key.
    pub path: String,
    /// The text of the doc comment.
    pub help: String,
    /// The values of the setting, unless it is only a table.
    pub forms: Forms,
    /// The default value.
    pub default: Option<Json>,
    /// Whether the default depends on the variant of the table.
    pub default_varies: bool,
    /// The short alias of the flag.
    pub alias: Option<String>,
    /// The rule for resuming, or `None` to use the rule of the table.
    pub resume: Option<ResumeRule>,
    /// The conditions that keep the setting.
    pub conditions: Vec<Condition>,
    /// Whether the setting was not tested on a GPU yet. The flag works, but `--help` does not list it.
    pub is_experimental: bool,
    /// The name of the value in the help.
    pub value_name: Option<String>,
    /// Whether the value is one of several variants, each with its own table below its name.
    pub has_variants: bool,
    /// The keys of the table.
    keys: Vec<Setting>,
}

impl Setting {
    /// Reads the settings of the table `path` from its schema.
    pub fn of_schema(path: &str, schema: &Json) -> Self {
        let mut setting = Self {
            path: path.into(),
            ..Self::default()
        };
        setting.read(schema);
        setting
    }

    /// Returns the key of this name in the table.
    pub fn key(&self, name: &str) -> Option<&Setting> {
        self.keys.iter().find(|key| key.name() == name)
    }

    pub fn key_mut(&mut self, name: &str) -> Option<&mut Setting> {
        self.keys.iter_mut().find(|key| key.name() == name)
    }

    /// Returns whether the setting is or may be a table with known keys.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Returns the last part of the key.
    pub fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or_default()
    }

    /// Returns the table that contains the key.
    pub fn table(&self) -> &str {
        self.path.rsplit_once('.').map_or("", |(table, _)| table)
    }

    /// Returns whether the key can have a value, in addition to or instead of the keys of its table.
    pub fn is_value(&self) -> bool {
        self.keys.is_empty() || !self.forms.is_table_only()
    }

    /// Returns whether the setting has a flag. Pure tables have no flag, and neither do keys that only a file can
    /// have.
    pub fn has_flag(&self) -> bool {
        self.is_value() && !["base", "model"].contains(&&self.path[..])
    }

    /// Returns the text of the default, if the setting has one.
    pub fn default_text(&self) -> Option<String> {
        let none = self.forms.can_be_unset.then_some(&Json::Null);
        let default = self.default.as_ref().or(none)?;
        Some(match default {
            _ if self.default_varies => "by variant".into(),
            Json::Null => "none".into(),
            other => other.to_string(),
        })
    }

    /// Returns the parser of the values on the command line.
    pub fn parser(&self) -> ValueParser {
        ValueParser {
            forms: self.forms.clone(),
            is_size: self.value_name.as_deref() == Some("BYTES"),
        }
    }

    /// Returns all settings of the table recursively. Each setting comes before the keys below it.
    pub fn descendants(&self) -> Box<dyn Iterator<Item = &Setting> + '_> {
        let below = |key| std::iter::once(key).chain(Setting::descendants(key));
        Box::new(self.keys.iter().flat_map(below))
    }

    /// Describes the values briefly: by the name of the value, or by the kinds of values.
    pub fn value_text(&self) -> String {
        match &self.value_name {
            Some(name) if self.forms.can_be_unset => format!("{name}|none"),
            Some(name) => name.clone(),
            None => self.forms.describe(),
        }
    }

    /// Adds a key whose value is one of these names.
    pub fn add_names(
        &mut self,
        key: &str,
        names: impl Iterator<Item = &'static str>,
        resume: ResumeRule,
    ) {
        let schema = serde_json::json!({
            "description": "The model family, which gives the defaults of the other settings",
            "enum": names.collect::<Vec<_>>(),
        });
        let key = self.entry(key);
        key.read(&schema);
        key.resume = Some(resume);
    }

    /// Returns the first key of a table that is not a key of this setting.
    pub fn unknown_key(&self, table: &Table) -> Option<String> {
        if self.keys.is_empty() {
            // The setting is a value, or a table with arbitrary keys.
            return None;
        }
        table.iter().find_map(|(name, value)| {
            let Some(key) = self.key(name) else {
                return Some(dotted(&self.path, name));
            };
            match value {
                Value::Table(table) => key.unknown_key(table),
                _ => None,
            }
        })
    }

    /// Replaces the defaults by the values of the root type.
    pub fn set_defaults(&mut self, defaults: &Json) {
        for key in &mut self.keys {
            if let Some(found) = json_at(defaults, &key.path) {
                key.default = Some(found.clone());
            }
            key.set_defaults(defaults);
        }
    }

    fn entry(&mut self, name: &str) -> &mut Setting {
        let found = self.keys.iter().position(|key| key.name() == name);
        let index = found.unwrap_or(self.keys.len());
        if found.is_none() {
            self.keys.push(Setting {
                path: dotted(&self.path, name),
                ..Setting::default()
            });
        }
        &mut self.keys[index]
    }

    /// Adds the contents of a schema: properties, values and keys.
    pub fn read(&mut self, schema: &Json) {
        let Some(schema) = schema.as_object() else {
            return self.forms.allow_any();
        };
        self.read_facts(schema);
        self.read_forms(schema);
    }

    fn read_facts(&mut self, schema: &Schema) {
        let text = |key: &str| schema.get(key).and_then(Json::as_str);
        if let Some(help) = text("description").filter(|_| self.help.is_empty()) {
            self.help = plain(help);
        }
        if let Some(default) = schema.get("default") {
            let first = self.default.get_or_insert_with(|| default.clone());
            self.default_varies |= first != default;
        }
        let owned = |key: &str| text(key).map(String::from);
        self.alias = self.alias.take().or_else(|| owned("flag"));
        self.value_name = self.value_name.take().or_else(|| owned("value"));
        self.resume = self.resume.or(match text("resume") {
            Some("fixed") => Some(ResumeRule::Fixed),
            Some("never") => Some(ResumeRule::Never),
            Some("may_differ") => Some(ResumeRule::MayDiffer),
            Some("order_of_sums") => Some(ResumeRule::OrderOfSums),
            _ => None,
        });
        self.is_experimental |= schema.get("experimental") == Some(&Json::Bool(true));
        let table = self.table().to_string();
        let conditions = [
            text("needs").map(|text| Condition::needed(text, &table)),
            text("follows").map(|text| Condition::followed(text, &table)),
        ];
        self.conditions.extend(conditions.into_iter().flatten());
    }

    fn read_forms(&mut self, schema: &Schema) {
        self.forms.read(schema);
        for branch in branches(schema) {
            match variant(branch) {
                Some((name, inner)) => {
                    self.has_variants = true;
                    self.forms.has_table = true;
                    let help = branch.get("description").and_then(Json::as_str);
                    let key = self.entry(name);
                    key.help = help.map(plain).unwrap_or_default();
                    key.read(inner);
                }
                None => {
                    let branch = branch.as_object().cloned().unwrap_or_default();
                    self.read_forms(&branch);
                    self.describe_tag(&branch);
                }
            }
        }
        let keys = schema.get("properties").and_then(Json::as_object);
        for (name, key) in keys.into_iter().flatten() {
            self.entry(name).read(key);
        }
    }

    /// Sets the help of the key that selects a variant to the text of the table. Sets the help of the variant's name
    /// to the text of the variant.
    fn describe_tag(&mut self, branch: &Schema) {
        let help = self.help.clone();
        let keys = branch.get("properties").and_then(Json::as_object);
        for (name, key) in keys.into_iter().flatten() {
            if let Some(value) = key.get("const") {
                let key = self.entry(name);
                key.help = help.clone();
                let text = branch.get("description").and_then(Json::as_str);
                let names = key.forms.names.iter_mut();
                for name in names.filter(|name| name.value == *value) {
                    name.help = text.map(plain);
                }
            }
        }
    }
}

/// Merges tables key by key. A different variant replaces the first variant. `setting` is the table, or `None` for a
/// table with arbitrary keys.
pub fn merge(setting: Option<&Setting>, into: &mut Table, from: &Table) {
    for (key, value) in from {
        let setting = setting.and_then(|table| table.key(key));
        let has_variants = setting.is_some_and(|setting| setting.has_variants);
        match (into.get_mut(key), value) {
            (Some(Value::Table(into)), Value::Table(from))
                if !has_variants || into.keys().eq(from.keys()) =>
            {
                merge(setting, into, from);
            }
            _ => drop(into.insert(key.clone(), value.clone())),
        }
    }
}
