//! The configuration of 8-bit layers.

use burn_megatron_kernels::fp8::Format;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// 8-bit arithmetic of the linear layers and experts of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fp8Config {
    /// The method of computing scales. Without a recipe, layers compute in the dtype of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("flag" = "fp8"))]
    pub recipe: Option<Fp8Recipe>,
    /// The formats of values and of gradients.
    #[schemars(extend("follows" = "recipe set"))]
    pub format: Fp8Format,
    /// The number of blocks at the start, and at the end, that compute in the dtype of the model. Overrides
    /// [`layers`](Self::layers).
    #[schemars(extend("follows" = "recipe set"))]
    pub first_last_bf16: usize,
    /// Whether the forward saves the FP8 copy of an input for the backward. The FP8 copy has one byte per element.
    /// Without it, the backward quantises the saved input again. Results do not change. Inputs that are split along the
    /// sequence are always saved in the dtype of the model.
    #[schemars(extend("resume" = "may_differ", "follows" = "recipe set"))]
    pub save_activations: bool,
    /// The run warns if more than this fraction of the values of a tensor exceed the largest value of the format.
    #[schemars(extend("follows" = "recipe set"))]
    pub saturation_limit: f64,
    /// Recipes of the layers whose paths match a pattern; later ones override earlier ones.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("follows" = "recipe set"))]
    pub layers: Vec<Fp8Layers>,
}

impl Default for Fp8Config {
    fn default() -> Self {
        Self {
            recipe: None,
            format: Fp8Format::Hybrid,
            first_last_bf16: 0,
            save_activations: true,
            saturation_limit: 0.01,
            layers: vec![],
        }
    }
}

/// A recipe for some of the layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fp8Layers {
    /// Matches the paths of the layers, such as `blocks.0.mlp.down`, or `blocks.0.moe.experts.down.3` of an expert.
    pub pattern: String,
    /// Their recipe; without one they compute in the type of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Fp8Recipe>,
}

/// The formats of values and of gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Fp8Format {
    /// E4M3 for values, E5M2 for gradients. MXFP8 and blockwise scaling keep E4M3 for both.
    #[default]
    Hybrid,
    /// E4M3 for both.
    E4m3,
}

/// The method of computing scales.
///
/// In a recipe, with default or with other settings:
///
/// ```toml
/// recipe = "delayed"
/// recipe = { delayed = { margin = 0, history = 16, amax = "most-recent" } }
/// recipe = { current = { epsilon = 0.0, power_of_two = true } }
/// recipe = { blockwise = { power_of_two = false } }
/// recipe = "mxfp8"
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(extend("names" = ["delayed", "current", "blockwise"]))]
pub enum Fp8Recipe {
    /// One scale per tensor, from the largest magnitudes of previous steps.
    Delayed(DelayedScaling),
    /// One scale per tensor, from its own largest magnitude.
    Current(CurrentScaling),
    /// One scale per 1 x 128 values of activations and gradients, and per 128 x 128 of weights.
    Blockwise(BlockScaling),
    /// One power of two per 32 values.
    MxFp8,
}

/// Settings of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DelayedScaling {
    /// Powers of two between the largest magnitude and the largest value of the format.
    pub margin: i32,
    /// The number of steps in the history.
    pub history: usize,
    /// Which magnitude of the history is used.
    pub amax: AmaxAlgorithm,
}

impl Default for DelayedScaling {
    fn default() -> Self {
        Self {
            margin: 0,
            history: 1024,
            amax: AmaxAlgorithm::Max,
        }
    }
}

/// Which magnitude of the history is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AmaxAlgorithm {
    /// The largest.
    #[default]
    Max,
    /// The magnitude of the last step.
    MostRecent,
}

/// Settings of current scaling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CurrentScaling {
    /// Lower bound of the largest magnitude.
    pub epsilon: f32,
    /// Whether scales are rounded down to powers of two.
    pub power_of_two: bool,
}

/// Settings of blockwise scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BlockScaling {
    /// Whether scales are rounded down to powers of two.
    pub power_of_two: bool,
}

impl Default for BlockScaling {
    fn default() -> Self {
        Self { power_of_two: true }
    }
}

impl Fp8Format {
    /// The formats of values and of gradients under a recipe.
    pub fn of(self, recipe: &Fp8Recipe) -> [Format; 2] {
        match (self, recipe) {
            (Self::Hybrid, Fp8Recipe::Delayed(_) | Fp8Recipe::Current(_)) => {
                [Format::E4M3, Format::E5M2]
            }
            _ => [Format::E4M3; 2],
        }
    }
}
