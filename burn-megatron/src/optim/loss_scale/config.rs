//! The settings of the loss scale.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{MAX_SCALE, MIN_SCALE};

/// The scaling of the loss.
///
/// In a recipe:
///
/// ```toml
/// loss_scale = "none"        # default
/// loss_scale = "dynamic"     # with the defaults of LossScaleConfig
/// loss_scale = 1024.0        # constant
/// loss_scale = { initial = 4294967296.0, hysteresis = 1 }   # dynamic; defaults for the others
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LossScale {
    /// The loss is not scaled, which is usual for bf16 and f32.
    #[default]
    None,
    /// The loss is multiplied by the same factor in every step.
    Constant(f64),
    /// The factor is reduced after overflows, and increased after steps without overflows.
    Dynamic(LossScaleConfig),
}

/// Settings of a dynamic loss scale. See [`LossScaler`](super::LossScaler) for the update rule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LossScaleConfig {
    /// The initial scale, at least `min` and at most 2^126.
    pub initial: f64,
    /// The lower bound of the scale, at least 2^-126 and at most `initial`.
    pub min: f64,
    /// The growth factor of the scale. It must be above 1.
    pub growth: f64,
    /// The factor that reduces the scale after an overflow. It must be between 0 and 1.
    pub backoff: f64,
    /// The number of consecutive steps without an overflow after which the scale grows. It must be at least 1.
    pub growth_interval: u32,
    /// The number of overflows, counted since the scale last grew, at which the scale is first reduced. Later overflows
    /// also reduce the scale. With 1, every overflow reduces the scale.
    pub hysteresis: u32,
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        Self {
            initial: 65536.0,
            min: 1.0,
            growth: 2.0,
            backoff: 0.5,
            growth_interval: 1000,
            hysteresis: 2,
        }
    }
}

/// The error for an invalid loss scale setting or an invalid loss scale in a checkpoint.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LossScaleError {
    /// A setting is out of its valid range.
    #[error("invalid loss_scale: {name} = {value} must {fits}")]
    Setting {
        /// The name of the setting.
        name: &'static str,
        /// The value of the setting.
        value: f64,
        /// The valid range.
        fits: String,
    },
    /// The loss scale in a checkpoint is out of the range that the settings of this run allow.
    #[error(
        "loss_scale: the checkpoint has a scale of {scale}, expected one between min = {min} and 2^126: \
         change min, or start with the initial scale"
    )]
    Saved {
        /// The loss scale in the checkpoint.
        scale: f64,
        /// The lower bound of the loss scale in this run.
        min: f64,
    },
    /// The checkpoint has a dynamic loss scale, but the run does not use a dynamic loss scale.
    #[error(
        "loss_scale: the checkpoint has a dynamic scale ({scale}), but the scale of this run is not dynamic: \
         set loss_scale = \"dynamic\", or do not load the saved scale"
    )]
    NotDynamic {
        /// The loss scale in the checkpoint.
        scale: f64,
    },
}

impl LossScale {
    /// Checks the settings.
    ///
    /// # Errors
    ///
    /// [`LossScaleError::Setting`] for the first setting that is out of its range.
    pub fn check(&self) -> Result<(), LossScaleError> {
        match self {
            Self::None => Ok(()),
            Self::Dynamic(config) => config.check(),
            Self::Constant(scale) => check_that(
                (MIN_SCALE..=MAX_SCALE).contains(scale),
                ("constant", *scale),
                || "lie between 2^-126 and 2^126".into(),
            ),
        }
    }
}

impl LossScaleConfig {
    /// Checks the settings.
    ///
    /// # Errors
    ///
    /// [`LossScaleError::Setting`] for the first setting that is out of its range.
    pub fn check(&self) -> Result<(), LossScaleError> {
        check_that(
            (MIN_SCALE..=MAX_SCALE).contains(&self.min),
            ("min", self.min),
            || "lie between 2^-126 and 2^126".into(),
        )?;
        check_that(
            (self.min..=MAX_SCALE).contains(&self.initial),
            ("initial", self.initial),
            || format!("lie between min = {} and 2^126", self.min),
        )?;
        check_that(
            self.growth > 1.0 && self.growth.is_finite(),
            ("growth", self.growth),
            || "be finite and above 1".into(),
        )?;
        check_that(
            self.backoff > 0.0 && self.backoff < 1.0,
            ("backoff", self.backoff),
            || "be above 0 and below 1".into(),
        )?;
        let counts = [
            ("growth_interval", self.growth_interval),
            ("hysteresis", self.hysteresis),
        ];
        counts.into_iter().try_for_each(|(name, count)| {
            check_that(count > 0, (name, count.into()), || "be at least 1".into())
        })
    }
}

fn check_that(
    fits: bool,
    (name, value): (&'static str, f64),
    what: impl FnOnce() -> String,
) -> Result<(), LossScaleError> {
    if fits {
        return Ok(());
    }
    Err(LossScaleError::Setting {
        name,
        value,
        fits: what(),
    })
}

/// The schema of the serialized forms.
impl JsonSchema for LossScale {
    fn schema_name() -> Cow<'static, str> {
        "LossScale".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let table = generator.subschema_for::<LossScaleConfig>();
        json_schema!({"anyOf": [{"enum": ["none", "dynamic"]}, {"type": "number"}, table]})
    }
}

impl Serialize for LossScale {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_str("none"),
            Self::Constant(scale) => serializer.serialize_f64(*scale),
            Self::Dynamic(config) => config.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for LossScale {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LossScaleVisitor)
    }
}

/// Deserializes each form by its type, so that an error names an unknown key of the table.
struct LossScaleVisitor;

impl<'de> Visitor<'de> for LossScaleVisitor {
    type Value = LossScale;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"none\", \"dynamic\", a number, or a table of a dynamic scale")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<LossScale, E> {
        match name {
            "none" => Ok(LossScale::None),
            "dynamic" => Ok(LossScale::Dynamic(LossScaleConfig::default())),
            other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
        }
    }

    fn visit_f64<E: de::Error>(self, scale: f64) -> Result<LossScale, E> {
        Ok(LossScale::Constant(scale))
    }

    fn visit_i64<E: de::Error>(self, scale: i64) -> Result<LossScale, E> {
        Ok(LossScale::Constant(scale as f64))
    }

    fn visit_u64<E: de::Error>(self, scale: u64) -> Result<LossScale, E> {
        Ok(LossScale::Constant(scale as f64))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LossScale, A::Error> {
        LossScaleConfig::deserialize(MapAccessDeserializer::new(map)).map(LossScale::Dynamic)
    }
}
