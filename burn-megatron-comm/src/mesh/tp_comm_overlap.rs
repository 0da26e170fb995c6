//! The split of the exchanges of sequence parallelism into chunks. Pure values.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The split of an all-gather or a reduce-scatter of the tensor axis into chunks, so that one travels while the product
/// of another is computed (`--tp-comm-overlap` of Megatron-LM).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum TpCommOverlap {
    /// The tokens of each rank travel from neighbour to neighbour, as one chunk or several: before a product the own ones are
    /// first, after a product they are last (`ring_exchange` of Transformer Engine).
    #[serde(alias = "ring_exchange")]
    #[schemars(extend("aliases" = ["ring_exchange"]))]
    Ring,
    /// Several collectives, each of an equal part of every rank's tokens (`pipeline` of Transformer Engine).
    #[serde(alias = "pipeline")]
    #[schemars(extend("aliases" = ["pipeline"]))]
    Bulk,
}

/// A text that is not the name of a [`TpCommOverlap`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid tp_comm_overlap \"{0}\": expected ring or bulk")]
pub struct ParseTpCommOverlapError(String);

impl TpCommOverlap {
    /// All methods.
    pub const ALL: [Self; 2] = [Self::Ring, Self::Bulk];

    /// The name, as in recipes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Bulk => "bulk",
        }
    }
}

impl FromStr for TpCommOverlap {
    type Err = ParseTpCommOverlapError;

    /// Also accepts the names of Transformer Engine.
    fn from_str(text: &str) -> Result<Self, ParseTpCommOverlapError> {
        match text {
            "ring" | "ring_exchange" => Ok(Self::Ring),
            "bulk" | "pipeline" => Ok(Self::Bulk),
            _ => Err(ParseTpCommOverlapError(text.into())),
        }
    }
}

impl fmt::Display for TpCommOverlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
