//! The overlap of the collectives of sequence parallelism with matrix multiplications.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

/// The method that splits an all-gather or a reduce-scatter of the tensor axis into chunks. One chunk is sent while the
/// matrix multiplication of another chunk is computed (`--tp-comm-overlap` of Megatron-LM).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(
    JsonSchema, strum::Display, strum::EnumString, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(parse_err_ty = ParseTpCommOverlapError, parse_err_fn = ParseTpCommOverlapError::new)]
pub enum TpCommOverlap {
    /// The tokens of each rank are sent around a ring of ranks, in one or several chunks. The matrix multiplication of
    /// the rank's own tokens is computed first after an all-gather, and last before a reduce-scatter (`ring_exchange`
    /// of Transformer Engine).
    #[serde(alias = "ring_exchange")]
    #[strum(to_string = "ring", serialize = "ring_exchange")]
    #[schemars(extend("aliases" = ["ring_exchange"]))]
    Ring,
    /// The collective is split into several collectives, each for an equal part of every rank's tokens (`pipeline` of
    /// Transformer Engine).
    #[serde(alias = "pipeline")]
    #[strum(to_string = "bulk", serialize = "pipeline")]
    #[schemars(extend("aliases" = ["pipeline"]))]
    Bulk,
}

/// The error for a string that is not the name of a [`TpCommOverlap`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid tp_comm_overlap \"{0}\": expected ring or bulk")]
pub struct ParseTpCommOverlapError(String);

impl ParseTpCommOverlapError {
    fn new(text: &str) -> Self {
        Self(text.into())
    }
}

impl TpCommOverlap {
    /// The list of all methods.
    pub const ALL: [Self; 2] = *Self::VARIANTS.as_array().unwrap();

    /// Returns the name that is used in recipes.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
