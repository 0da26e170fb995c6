//! Parsing of a scaling recipe, which is a name or a table with settings.

use std::fmt;
use std::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::config::{BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe};

/// The error for an invalid recipe name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid FP8 recipe \"{0}\": expected delayed, current, blockwise or mxfp8")]
pub struct UnknownFp8Recipe(pub String);

impl FromStr for Fp8Recipe {
    type Err = UnknownFp8Recipe;

    /// Parses the name of a recipe with default settings.
    fn from_str(name: &str) -> Result<Self, UnknownFp8Recipe> {
        match name {
            "delayed" => Ok(Self::Delayed(DelayedScaling::default())),
            "current" => Ok(Self::Current(CurrentScaling::default())),
            "blockwise" => Ok(Self::Blockwise(BlockScaling::default())),
            "mxfp8" => Ok(Self::MxFp8),
            other => Err(UnknownFp8Recipe(other.into())),
        }
    }
}

impl Fp8Recipe {
    /// Returns the name of the recipe, as it is written in settings and flags.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Delayed(_) => "delayed",
            Self::Current(_) => "current",
            Self::Blockwise(_) => "blockwise",
            Self::MxFp8 => "mxfp8",
        }
    }
}

impl<'de> Deserialize<'de> for Fp8Recipe {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RecipeVisitor)
    }
}

/// The recipes with settings, as keys of a table.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum RecipeTable {
    Delayed(DelayedScaling),
    Current(CurrentScaling),
    Blockwise(BlockScaling),
}

struct RecipeVisitor;

impl<'de> Visitor<'de> for RecipeVisitor {
    type Value = Fp8Recipe;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "delayed, current, blockwise or mxfp8, or a table such as {{ delayed = {{ history = 16 }} }}"
        )
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Fp8Recipe, E> {
        name.parse().map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Fp8Recipe, A::Error> {
        let table = RecipeTable::deserialize(MapAccessDeserializer::new(map))?;
        Ok(match table {
            RecipeTable::Delayed(settings) => Fp8Recipe::Delayed(settings),
            RecipeTable::Current(settings) => Fp8Recipe::Current(settings),
            RecipeTable::Blockwise(settings) => Fp8Recipe::Blockwise(settings),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_is_a_name_or_a_table() {
        let read = |text: &str| serde_json::from_str::<Fp8Recipe>(text);
        for name in ["delayed", "current", "blockwise", "mxfp8"] {
            let recipe = read(&format!("\"{name}\"")).unwrap();
            assert_eq!((recipe, recipe.name()), (name.parse().unwrap(), name));
            let written = serde_json::to_string(&recipe).unwrap();
            assert_eq!(read(&written).unwrap(), recipe, "{written}");
        }
        let recipe = read(r#"{"delayed": {"history": 16}}"#).unwrap();
        let settings = DelayedScaling {
            history: 16,
            ..DelayedScaling::default()
        };
        assert_eq!(recipe, Fp8Recipe::Delayed(settings));
    }

    #[test]
    fn an_invalid_recipe_is_named() {
        let error = |text: &str| {
            let error = serde_json::from_str::<Fp8Recipe>(text).unwrap_err();
            error.to_string()
        };
        let unknown = "invalid FP8 recipe \"delay\": expected delayed, current, blockwise or mxfp8";
        assert!(error("\"delay\"").starts_with(unknown));
        assert!(error(r#"{"delayed": {"hystory": 1}}"#).contains("unknown field `hystory`"));
        assert!(error("3").contains("expected delayed, current, blockwise or mxfp8, or a table"));
    }
}
