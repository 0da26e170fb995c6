//! The setting that fuses GELU into the matmuls of an MLP as an epilogue.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, json_schema};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::KernelChoiceError;

/// Whether the GELU of an MLP is computed as an epilogue of the matmuls before and after it. In recipes the value is
/// `true`, `false` or `"measured"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
#[schemars(transform = bool_or_name)]
pub enum EpilogueFusion {
    /// GELU runs in separate kernels.
    #[default]
    Off,
    /// GELU is an epilogue. An error is returned if the model or the device does not support epilogues.
    On,
    /// The faster of the two implementations is used. A run measures both implementations once before its model is
    /// built. Until then layers are built as with [`Off`](Self::Off).
    Measured,
}

const MEASURED: &str = "measured";

/// Sets the schema to the serialized form: a bool or a name.
fn bool_or_name(schema: &mut Schema) {
    *schema = json_schema!({"enum": [true, false, MEASURED]});
}

/// The sizes of an MLP with epilogues on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EpilogueShape {
    /// The number of input features of the first matmul.
    pub hidden: usize,
    /// The number of features of the GELU input on this rank.
    pub width: usize,
    /// Whether the first matmul has a bias.
    pub bias: bool,
}

impl From<bool> for EpilogueFusion {
    fn from(is_on: bool) -> Self {
        if is_on { Self::On } else { Self::Off }
    }
}

impl FromStr for EpilogueFusion {
    type Err = KernelChoiceError;

    fn from_str(text: &str) -> Result<Self, KernelChoiceError> {
        match text {
            "true" => Ok(Self::On),
            "false" => Ok(Self::Off),
            MEASURED => Ok(Self::Measured),
            other => Err(KernelChoiceError::InvalidEpilogueFusion(other.into())),
        }
    }
}

impl Serialize for EpilogueFusion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_bool(false),
            Self::On => serializer.serialize_bool(true),
            Self::Measured => serializer.serialize_str(MEASURED),
        }
    }
}

impl<'de> Deserialize<'de> for EpilogueFusion {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BoolOrName)
    }
}

/// Deserializes a bool, which all versions write, or a name.
struct BoolOrName;

impl Visitor<'_> for BoolOrName {
    type Value = EpilogueFusion;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("true, false or \"measured\"")
    }

    fn visit_bool<E: Error>(self, is_on: bool) -> Result<EpilogueFusion, E> {
        Ok(is_on.into())
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<EpilogueFusion, E> {
        name.parse().map_err(E::custom)
    }
}
