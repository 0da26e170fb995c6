//! JSON values whose objects keep the order of their keys, as in Python.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::ChatValue;

/// A JSON value whose objects keep the order of their keys.
#[derive(Clone, Debug)]
pub struct JsonValue(pub ChatValue);

/// A map in the order of its keys' first occurrences.
#[derive(Debug, Default)]
struct OrderedMap(Vec<(String, ChatValue)>);

impl Object for OrderedMap {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &ChatValue) -> Option<ChatValue> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<ChatValue> {
        let found = self.0.iter().find(|(own, _)| own == key)?;
        Some(found.1.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(
            self.0
                .iter()
                .map(|(key, _)| ChatValue::from(&**key))
                .collect(),
        )
    }
}

/// Creates a map that keeps the order of its keys. If a key is repeated, its last value is used.
pub fn ordered_map<K: Into<String>>(pairs: impl IntoIterator<Item = (K, ChatValue)>) -> ChatValue {
    let mut map = OrderedMap::default();
    for (key, value) in pairs {
        let key = key.into();
        match map.0.iter_mut().find(|(own, _)| *own == key) {
            Some((_, own)) => *own = value,
            None => map.0.push((key, value)),
        }
    }
    ChatValue::from_object(map)
}

impl<'de> Deserialize<'de> for JsonValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = JsonValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<JsonValue, E> {
        Ok(JsonValue(ChatValue::from(())))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<JsonValue, E> {
        Ok(JsonValue(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<JsonValue, E> {
        Ok(JsonValue(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<JsonValue, E> {
        Ok(JsonValue(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<JsonValue, E> {
        Ok(JsonValue(value.into()))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<JsonValue, E> {
        Ok(JsonValue(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<JsonValue, A::Error> {
        let mut values = vec![];
        while let Some(JsonValue(value)) = seq.next_element()? {
            values.push(value);
        }
        Ok(JsonValue(values.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonValue, A::Error> {
        let mut pairs = vec![];
        while let Some((key, JsonValue(value))) = map.next_entry::<String, _>()? {
            pairs.push((key, value));
        }
        Ok(JsonValue(ordered_map(pairs)))
    }
}
