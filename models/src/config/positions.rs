//! The position embedding of a transformer.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::RotaryScaling;

/// The kind of position embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Positions {
    /// Learned position embedding: a vector per position is added to the token embedding.
    Learned,
    /// Rotary position embedding (RoPE).
    Rotary {
        /// The base of the rotary frequencies (`rope_theta`), which is 10,000 in Llama 2.
        base: f64,
        /// The scaling of rotary frequencies for longer sequences.
        #[serde(default)]
        scaling: RotaryScaling,
    },
}

impl Positions {
    /// Returns a rotary position embedding with this base and without scaling, as in Llama 2.
    pub fn rotary(base: f64) -> Self {
        Self::Rotary {
            base,
            scaling: RotaryScaling::None,
        }
    }
}
