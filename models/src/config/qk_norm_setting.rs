//! Reads and writes the setting `qk_norm` of a recipe: `false` for no norm, `"heads"` or `true` for a norm per head,
//! and `"whole"` for a norm over all heads.

use std::fmt;

use burn_megatron::nn::QkNorm;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

pub fn serialize<S: Serializer>(norm: &Option<QkNorm>, serializer: S) -> Result<S::Ok, S::Error> {
    match norm {
        None => serializer.serialize_bool(false),
        Some(QkNorm::Heads) => serializer.serialize_bool(true),
        Some(QkNorm::Whole) => serializer.serialize_str("whole"),
    }
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<QkNorm>, D::Error> {
    deserializer.deserialize_any(Setting)
}

pub fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"enum": [true, false, "heads", "whole"]})
}

struct Setting;

impl Visitor<'_> for Setting {
    type Value = Option<QkNorm>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("true, false, \"heads\" or \"whole\"")
    }

    fn visit_bool<E: Error>(self, on: bool) -> Result<Self::Value, E> {
        Ok(on.then_some(QkNorm::Heads))
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        match name {
            "heads" => Ok(Some(QkNorm::Heads)),
            "whole" => Ok(Some(QkNorm::Whole)),
            other => Err(E::unknown_variant(other, &["heads", "whole"])),
        }
    }
}
