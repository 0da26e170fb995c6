//! The stages of ZeRO, which determine the sharded state.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

/// A ZeRO stage: the state that is sharded over the ranks of a data-parallel group instead of being replicated.
///
/// A stage is written as its number. Each stage also shards the state of the previous stage.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(try_from = "u8", into = "u8")]
#[derive(JsonSchema, strum::VariantArray)]
#[schemars(extend("enum" = [0, 1, 2, 3]))]
pub enum ZeroStage {
    /// No state is sharded.
    #[default]
    Replicated = 0,
    /// The optimizer state (master weights and moments) is sharded.
    Optimizer = 1,
    /// The reduced gradients are sharded in addition to the optimizer state.
    Gradients = 2,
    /// The parameters are sharded in addition to the gradients and the optimizer state. They are gathered one FSDP unit
    /// at a time.
    Parameters = 3,
}

impl ZeroStage {
    /// The list of all stages.
    pub const ALL: [Self; 4] = *Self::VARIANTS.as_array().unwrap();
}

/// The error for a string or number that is not a ZeRO stage.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid ZeRO stage \"{0}\": expected 0 (nothing is sharded), 1 (the optimizer state), 2 (the gradients \
     too) or 3 (the parameters too)"
)]
pub struct ParseZeroStageError(pub String);

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> u8 {
        stage as u8
    }
}

impl TryFrom<u8> for ZeroStage {
    type Error = ParseZeroStageError;

    fn try_from(number: u8) -> Result<Self, ParseZeroStageError> {
        let stage = Self::ALL.get(usize::from(number));
        stage
            .copied()
            .ok_or(ParseZeroStageError(number.to_string()))
    }
}

impl FromStr for ZeroStage {
    type Err = ParseZeroStageError;

    fn from_str(text: &str) -> Result<Self, ParseZeroStageError> {
        let number: Result<u8, _> = text.parse();
        let invalid = |_| ParseZeroStageError(text.into());
        number.map_err(invalid)?.try_into()
    }
}

impl fmt::Display for ZeroStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&u8::from(*self), f)
    }
}
