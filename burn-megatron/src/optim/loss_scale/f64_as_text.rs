//! Serializes an f64 as text, which preserves its bits in every format.

use serde::{Deserialize, Deserializer, Serializer, de};

pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    // The shortest text that parses to the same number.
    serializer.collect_str(value)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let text = String::deserialize(deserializer)?;
    let unexpected = |_| de::Error::invalid_value(de::Unexpected::Str(&text), &"a number as text");
    text.parse().map_err(unexpected)
}
