//! Dotted keys of a recipe, and access to its tables by these keys.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use toml::{Table, Value};

use crate::error::Error;

/// Returns the dotted key of `key` in the table `path`.
pub fn dotted(path: &str, key: &str) -> String {
    match path {
        "" => key.into(),
        path => format!("{path}.{key}"),
    }
}

/// Returns whether a path names the table or a key in the table.
pub fn is_within(path: &str, table: &str) -> bool {
    let rest = path.strip_prefix(table);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Converts a complete recipe, or a part of a recipe, to tables.
pub fn table_of(value: &impl Serialize) -> Result<Table, Error> {
    Ok(toml::to_string(value)?.parse()?)
}

/// Changes the table with the key `key` of a recipe.
///
/// # Errors
/// Returns an error for values of the wrong type.
pub fn change<T: Serialize + DeserializeOwned>(
    recipe: &mut Table,
    key: &str,
    change: impl FnOnce(&mut T),
) -> Result<(), Error> {
    let table = recipe.remove(key);
    let mut table: T = table.unwrap_or(Table::new().into()).try_into()?;
    change(&mut table);
    recipe.insert(key.into(), table_of(&table)?.into());
    Ok(())
}

/// Returns the value of a dotted key.
pub fn get<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    let mut keys = path.split('.');
    let first = table.get(keys.next()?)?;
    keys.try_fold(first, |value, key| value.get(key))
}

/// Sets a dotted key.
pub fn set(table: &mut Table, path: &str, value: Value) {
    let Some((first, rest)) = path.split_once('.') else {
        table.insert(path.into(), value);
        return;
    };
    let inner = table.entry(first).or_insert(Value::Table(Table::new()));
    match inner {
        Value::Table(inner) => set(inner, rest, value),
        // The value is a variant without settings.
        other => {
            let mut inner = Table::new();
            set(&mut inner, rest, value);
            *other = Value::Table(inner);
        }
    }
}

/// Removes a dotted key, and returns its value.
pub fn remove(table: &mut Table, path: &str) -> Option<Value> {
    let Some((first, rest)) = path.split_once('.') else {
        return table.remove(path);
    };
    remove(table.get_mut(first)?.as_table_mut()?, rest)
}

/// Returns the value of a dotted key in JSON.
pub fn json_at<'a>(value: &'a Json, path: &str) -> Option<&'a Json> {
    path.split('.').try_fold(value, |value, key| value.get(key))
}
