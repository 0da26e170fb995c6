//! Serde helpers (`with`) for floats in JSON. Finite values are written as numbers, and NaN and infinity are written as
//! strings.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() {
        serializer.serialize_f64(*value)
    } else {
        serializer.collect_str(value)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Value {
    Number(f64),
    Text(String),
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Number(number) => Ok(number),
        Value::Text(text) => match text.as_str() {
            "NaN" => Ok(f64::NAN),
            "inf" => Ok(f64::INFINITY),
            "-inf" => Ok(f64::NEG_INFINITY),
            other => Err(D::Error::custom(format!("'{other}' is not a number"))),
        },
    }
}

#[derive(Serialize, Deserialize)]
struct Float(#[serde(serialize_with = "serialize", deserialize_with = "deserialize")] f64);

/// The same for an optional float.
pub(super) mod option {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Float;

    pub(crate) fn serialize<S: Serializer>(
        value: &Option<f64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.map(Float).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<f64>, D::Error> {
        let value = Option::<Float>::deserialize(deserializer)?;
        Ok(value.map(|Float(value)| value))
    }
}

/// The same for the values of a map.
pub(super) mod map {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Float;

    pub(crate) fn serialize<K: Serialize, S: Serializer>(
        values: &BTreeMap<K, f64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_map(values.iter().map(|(key, value)| (key, Float(*value))))
    }

    pub(crate) fn deserialize<'de, K: Deserialize<'de> + Ord, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<K, f64>, D::Error> {
        let values = BTreeMap::<K, Float>::deserialize(deserializer)?;
        let values = values.into_iter().map(|(key, Float(value))| (key, value));
        Ok(values.collect())
    }
}
