//! The split of the exchanges of sequence parallelism into chunks. Pure values.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

/// The split of an all-gather or a reduce-scatter of the tensor axis into chunks, so that one travels while the product
/// of another is computed (`--tp-comm-overlap` of Megatron-LM).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(
    JsonSchema, strum::Display, strum::EnumString, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(parse_err_ty = ParseTpCommOverlapError, parse_err_fn = ParseTpCommOverlapError::new)]
pub enum TpCommOverlap {
    /// The tokens of each rank travel from neighbour to neighbour, as one chunk or several: before a product the own ones are
    /// first, after a product they are last (`ring_exchange` of Transformer Engine).
    #[serde(alias = "ring_exchange")]
    #[strum(to_string = "ring", serialize = "ring_exchange")]
    #[schemars(extend("aliases" = ["ring_exchange"]))]
    Ring,
    /// Several collectives, each of an equal part of every rank's tokens (`pipeline` of Transformer Engine).
    #[serde(alias = "pipeline")]
    #[strum(to_string = "bulk", serialize = "pipeline")]
    #[schemars(extend("aliases" = ["pipeline"]))]
    Bulk,
}

/// A text that is not the name of a [`TpCommOverlap`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid tp_comm_overlap \"{0}\": expected ring or bulk")]
pub struct ParseTpCommOverlapError(String);

impl ParseTpCommOverlapError {
    fn new(text: &str) -> Self {
        Self(text.into())
    }
}

impl TpCommOverlap {
    /// All methods.
    pub const ALL: [Self; 2] = *Self::VARIANTS.as_array().unwrap();

    /// The name, as in recipes.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
