//! Configuration of FP8 layers.

use burn_megatron_kernels::fp8::Format;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// FP8 arithmetic of the linear layers and experts of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fp8Config {
    /// The scaling recipe. Without a recipe, layers compute in the type of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("flag" = "fp8"))]
    pub recipe: Option<Fp8Recipe>,
    /// The FP8 formats of values and of gradients.
    #[schemars(extend("follows" = "recipe set"))]
    pub format: Fp8Format,
    /// The number of blocks at the beginning, and at the end, that compute in the type of the model. It overrides
    /// [`layers`](Self::layers).
    #[schemars(extend("follows" = "recipe set"))]
    pub first_last_bf16: usize,
    /// Whether the forward saves an FP8 copy of each input for the backward, with one byte per element. Otherwise it
    /// saves the input in the type of the model, and the backward quantizes it again. The results are the same. A
    /// rank with a part of the sequence always saves its part in the type of the model, and gathers it again.
    #[schemars(extend("resume" = "may_differ", "follows" = "recipe set"))]
    pub save_activations: bool,
    /// The run warns if more than this fraction of the values of a tensor exceeds the largest value of its format.
    #[schemars(extend("follows" = "recipe set"))]
    pub saturation_limit: f64,
    /// Recipes of layers whose paths match a pattern. Later entries override earlier entries.
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

/// A recipe for layers that match a pattern.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fp8Layers {
    /// The pattern for layer paths, such as `blocks.0.mlp.down`, or `blocks.0.moe.experts.down.3` for an expert.
    pub pattern: String,
    /// The recipe of the layers. Without a recipe, they compute in the type of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Fp8Recipe>,
}

/// The FP8 formats of values and of gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Fp8Format {
    /// E4M3 for values, E5M2 for gradients. MXFP8 and blockwise scaling keep E4M3 for both.
    #[default]
    Hybrid,
    /// E4M3 for both.
    E4m3,
}

/// The scaling recipe.
///
/// Examples with default settings and with other settings:
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
    /// Delayed scaling: one scale per tensor, from the largest magnitudes of previous steps.
    Delayed(DelayedScaling),
    /// Current scaling: one scale per tensor, from its own largest magnitude.
    Current(CurrentScaling),
    /// Blockwise scaling: one scale per 1 x 128 values of activations and gradients, and per 128 x 128 values of
    /// weights.
    Blockwise(BlockScaling),
    /// MXFP8: one power of two per 32 values.
    MxFp8,
}

/// Settings of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DelayedScaling {
    /// The distance between the largest magnitude and the largest value of the format, in powers of two.
    pub margin: i32,
    /// The number of steps in the history.
    pub history: usize,
    /// The magnitude of the history that is used.
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

/// The magnitude of the history that is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AmaxAlgorithm {
    /// The largest magnitude of the history.
    #[default]
    Max,
    /// The magnitude of the last step.
    MostRecent,
}

/// Settings of current scaling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CurrentScaling {
    /// A lower bound of the largest magnitude.
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
    /// Returns the formats of values and of gradients under a recipe.
    pub fn of(self, recipe: &Fp8Recipe) -> [Format; 2] {
        match (self, recipe) {
            (Self::Hybrid, Fp8Recipe::Delayed(_) | Fp8Recipe::Current(_)) => {
                [Format::E4M3, Format::E5M2]
            }
            _ => [Format::E4M3; 2],
        }
    }
}
