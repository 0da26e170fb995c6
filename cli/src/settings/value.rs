//! The values of a setting, and their form in flags.

use serde_json::Value as Json;
use toml::{Table, Value};

use super::schema::{Schema, branches, plain};
use crate::byte_size::ByteSize;

/// Name or number that a setting may have.
#[derive(Clone, Debug, PartialEq)]
pub struct Name {
    /// The value.
    pub value: Json,
    /// Other names for the value on the command line.
    aliases: Vec<String>,
    /// The text of the doc comment.
    pub help: Option<String>,
}

/// Kinds of values that a setting may have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Forms {
    /// Whether the setting may have no value.
    pub can_be_unset: bool,
    pub has_table: bool,
    is_any: bool,
    boolean: bool,
    /// Whether integers are allowed, with the minimum.
    integer: Option<Option<i64>>,
    number: bool,
    text: bool,
    pub names: Vec<Name>,
    list: Option<Box<Forms>>,
}

/// Value of a flag.
#[derive(Clone, Debug, PartialEq)]
pub enum Given {
    /// `none`: the setting has no value.
    Unset,
    /// A value of the recipe.
    Value(Value),
}

impl Name {
    /// Returns the name on the command line.
    pub fn text(&self) -> String {
        match &self.value {
            Json::String(text) => text.clone(),
            other => other.to_string(),
        }
    }

    /// Returns whether `text` is this name or one of its aliases.
    pub fn is(&self, text: &str) -> bool {
        self.text() == text || self.aliases.iter().any(|alias| alias == text)
    }
}

impl Forms {
    /// Allows any value.
    pub fn allow_any(&mut self) {
        self.is_any = true;
    }

    /// Returns whether the value can only be a table.
    pub fn is_table_only(&self) -> bool {
        let table = Self {
            has_table: true,
            ..Self::default()
        };
        *self == table
    }

    /// Returns whether the value can only be text.
    pub fn is_text_only(&self) -> bool {
        let text = Self {
            text: true,
            can_be_unset: self.can_be_unset,
            ..Self::default()
        };
        *self == text
    }

    /// Adds the kinds of a schema, without the kinds of its branches.
    pub fn read(&mut self, schema: &Schema) {
        let names = |key: &str| {
            schema
                .get(key)
                .and_then(Json::as_array)
                .into_iter()
                .flatten()
        };
        let texts = |key: &str| names(key).filter_map(Json::as_str).map(String::from);
        let listed = names("enum")
            .chain(names("names"))
            .chain(schema.get("const"));
        let mut has_names = false;
        for value in listed {
            has_names = true;
            if value.is_null() {
                self.can_be_unset = true;
            } else if !self.names.iter().any(|name| name.value == *value) {
                self.names.push(Name {
                    value: value.clone(),
                    aliases: texts("aliases").collect(),
                    help: schema
                        .get("description")
                        .and_then(Json::as_str)
                        .filter(|_| schema.contains_key("const"))
                        .map(plain),
                });
            }
        }
        let types = match schema.get("type") {
            Some(Json::Array(types)) => types.iter().filter_map(Json::as_str).collect(),
            Some(Json::String(only)) => vec![&only[..]],
            _ => vec![],
        };
        for kind in types {
            match kind {
                "null" => self.can_be_unset = true,
                "object" => self.has_table = true,
                "array" => {
                    let items = schema.get("items").and_then(Json::as_object);
                    self.list = Some(Box::new(items.map(Self::of).unwrap_or_default()));
                }
                _ if has_names => {}
                "boolean" => self.boolean = true,
                "integer" => self.integer = Some(schema.get("minimum").and_then(Json::as_i64)),
                "number" => self.number = true,
                "string" => self.text = true,
                _ => {}
            }
        }
    }

    /// Returns the kinds of a schema, including its branches.
    fn of(schema: &Schema) -> Self {
        let mut forms = Self::default();
        forms.read(schema);
        for branch in branches(schema).filter_map(Json::as_object) {
            let branch = Self::of(branch);
            forms.can_be_unset |= branch.can_be_unset;
            forms.has_table |= branch.has_table;
            forms.boolean |= branch.boolean;
            forms.integer = forms.integer.or(branch.integer);
            forms.number |= branch.number;
            forms.text |= branch.text;
            forms.names.extend(branch.names);
            forms.list = forms.list.or(branch.list);
        }
        forms
    }

    /// Returns the value of a flag without a value, if the flag may have none.
    pub fn alone(&self) -> Option<&'static str> {
        let has_true = self.names.iter().any(|name| name.value == Json::Bool(true));
        if self.boolean || has_true {
            Some("true")
        } else if self.has_table && self.can_be_unset && self.names.is_empty() {
            // An empty table enables a feature with the default settings.
            Some("{}")
        } else {
            None
        }
    }

    /// Returns whether a flag may be repeated. Each flag then adds to a list.
    pub fn is_list(&self) -> bool {
        self.list.is_some()
    }

    /// Returns the name of the value in the help.
    pub fn describe(&self) -> String {
        let mut parts: Vec<_> = self.names.iter().map(Name::text).collect();
        let mut add = |has: bool, name: &str| {
            if has {
                parts.push(name.into());
            }
        };
        add(self.boolean, "BOOL");
        add(self.integer.is_some(), "N");
        add(self.number, "NUMBER");
        add(self.text || self.is_any, "TEXT");
        if let Some(items) = &self.list {
            parts.push(format!("{},..", items.describe()));
        }
        if self.has_table {
            parts.push("TABLE".into());
        }
        if self.can_be_unset && !parts.contains(&"none".into()) {
            parts.push("none".into());
        }
        parts.join("|")
    }

    /// Parses the value of a flag.
    ///
    /// # Errors
    /// Returns the expected values.
    pub fn parse(&self, text: &str) -> Result<Given, String> {
        let is_name = |name: &&Name| name.is(text);
        if let Some(name) = self.names.iter().find(is_name) {
            let value = Value::try_from(&name.value);
            return value.map(Given::Value).map_err(|error| error.to_string());
        }
        if self.can_be_unset && text == "none" {
            return Ok(Given::Unset);
        }
        let value = self
            .value(text)
            .ok_or_else(|| format!("expected {}", self.expected()))?;
        Ok(Given::Value(value))
    }

    fn value(&self, text: &str) -> Option<Value> {
        let from_toml = || from_toml(text);
        let brackets = text.chars().next().unwrap_or_default();
        match brackets {
            '[' if self.list.is_some() => return from_toml(),
            '{' if self.has_table => return from_toml(),
            // A list of tables. The commas inside a table do not separate list items.
            '{' if self.list.is_some() => return self.value(&format!("[{text}]")),
            _ => {}
        }
        if self.boolean
            && let Ok(value) = text.parse::<bool>()
        {
            return Some(value.into());
        }
        if let Some(least) = self.integer
            && let Ok(value) = text.parse::<i64>()
        {
            return (value >= least.unwrap_or(i64::MIN)).then(|| value.into());
        }
        if self.number
            && let Ok(value) = text.parse::<f64>()
        {
            return Some(value.into());
        }
        if self.is_any {
            return from_toml().or_else(|| Some(text.into()));
        }
        if self.text {
            return Some(text.into());
        }
        let forms = self.list.as_ref()?;
        let items = text.split(',').filter(|item| !item.is_empty());
        let items = items.map(|item| match forms.parse(item.trim()) {
            Ok(Given::Value(value)) => Some(value),
            Ok(Given::Unset) | Err(_) => None,
        });
        items.collect::<Option<Vec<_>>>().map(Value::Array)
    }

    /// Describes the expected values in words.
    fn expected(&self) -> String {
        let mut parts: Vec<_> = self.names.iter().map(Name::text).collect();
        if self.boolean {
            parts.push("true or false".into());
        }
        match self.integer {
            Some(Some(least)) => parts.push(format!("an integer from {least}")),
            Some(None) => parts.push("an integer".into()),
            None => {}
        }
        if self.number {
            parts.push("a number".into());
        }
        if let Some(items) = &self.list {
            parts.push(format!(
                "a list, separated by commas, of {}",
                items.expected()
            ));
        }
        if self.has_table {
            parts.push("a table, as in '{key = 1}'".into());
        }
        if self.can_be_unset && !parts.contains(&"none".into()) {
            parts.push("none".into());
        }
        match &parts[..] {
            [] => "text".into(),
            [only] => only.clone(),
            [first @ .., last] => format!("{} or {last}", first.join(", ")),
        }
    }
}

/// Parses a value in TOML.
pub fn from_toml(text: &str) -> Option<Value> {
    let table = format!("x = {text}").parse::<Table>().ok()?;
    table.get("x").cloned().filter(|_| table.len() == 1)
}

/// Parser for values on the command line.
#[derive(Clone, Debug)]
pub struct ValueParser {
    /// The kinds of values.
    pub forms: Forms,
    /// Whether the value may be a size, such as 2GiB.
    pub is_size: bool,
}

impl ValueParser {
    /// Parses the value of a flag.
    ///
    /// # Errors
    /// Returns the expected values.
    pub fn parse(&self, text: &str) -> Result<Given, String> {
        match self.forms.parse(text) {
            Err(_) if self.is_size => bytes(text),
            parsed => parsed,
        }
    }
}

/// Parses a number of bytes, such as 2GiB.
fn bytes(text: &str) -> Result<Given, String> {
    let ByteSize(bytes) = text.parse()?;
    let bytes = i64::try_from(bytes).map_err(|error| error.to_string())?;
    Ok(Given::Value(bytes.into()))
}
