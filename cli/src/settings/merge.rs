//! Tables of a recipe by dotted keys.

use toml::{Table, Value};

use super::schema::Setting;

/// Merges tables key by key. Another variant of a setting replaces the first one. `setting` is the table; `None` for a table
/// with keys of any name.
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
        // A variant without settings.
        other => {
            let mut inner = Table::new();
            set(&mut inner, rest, value);
            *other = Value::Table(inner);
        }
    }
}

/// Removes a dotted key; returns whether it was there.
pub fn remove(table: &mut Table, path: &str) -> bool {
    let Some((first, rest)) = path.split_once('.') else {
        return table.remove(path).is_some();
    };
    let inner = table.get_mut(first).and_then(Value::as_table_mut);
    inner.is_some_and(|inner| remove(inner, rest))
}
