//! Deserializes JSON objects without repeated keys. JSON parsers keep only the last value of a repeated key, which
//! hides the other values.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

/// Deserializes a JSON object, for `#[serde(deserialize_with)]`.
///
/// # Errors
///
/// The errors of the JSON parser, and an error for a repeated key.
pub fn unique_keys<'de, D, V>(deserializer: D) -> Result<BTreeMap<String, V>, D::Error>
where
    D: Deserializer<'de>,
    V: Deserialize<'de>,
{
    deserializer.deserialize_map(UniqueKeys(PhantomData))
}

struct UniqueKeys<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueKeys<V> {
    type Value = BTreeMap<String, V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, V>()? {
            if entries.contains_key(&key) {
                return Err(A::Error::custom(format!("it has {key:?} twice")));
            }
            entries.insert(key, value);
        }
        Ok(entries)
    }
}
