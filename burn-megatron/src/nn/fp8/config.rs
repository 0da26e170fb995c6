//! Configuration of FP8 layers.

use burn_megatron_kernels::fp8::Format;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Configuration of FP8 training for the linear layers and experts of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fp8Config {
    /// The scaling recipe. Without a recipe, layers do not use FP8 and compute in the dtype of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("flag" = "fp8"))]
    pub recipe: Option<Fp8Recipe>,
    /// The FP8 formats of forward values (inputs and weights) and of gradients.
    #[schemars(extend("follows" = "recipe set"))]
    pub format: Fp8Format,
    /// The number `n` of blocks at each end of the model that do not use FP8. The first `n` and the last `n`
    /// transformer blocks compute in the dtype of the model. This setting overrides [`layers`](Self::layers).
    #[schemars(extend("follows" = "recipe set"))]
    pub first_last_bf16: usize,
    /// Whether the forward pass saves an FP8 copy of each input for the backward pass, with one byte per element.
    /// Otherwise it saves the input in the dtype of the model, and the backward pass quantizes the input again. The
    /// results are the same. This setting does not apply to an input that is all-gathered under sequence parallelism.
    /// Each rank then saves its part of the input in the dtype of the model, and the backward pass gathers the input
    /// again.
    #[schemars(extend("resume" = "may_differ", "follows" = "recipe set"))]
    pub save_activations: bool,
    /// The maximum fraction of saturated values in a tensor. A value is saturated if it exceeds the largest value of
    /// the FP8 format. If the fraction exceeds this limit, a warning is logged.
    #[schemars(extend("follows" = "recipe set"))]
    pub saturation_limit: f64,
    /// Recipes for layers whose paths match a pattern. If several entries match a layer, the last entry applies.
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

/// A recipe for the layers whose paths match a pattern.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fp8Layers {
    /// The pattern for the layer paths. Examples of paths are `blocks.0.mlp.down`, and `blocks.0.moe.experts.down.3`
    /// for an expert.
    pub pattern: String,
    /// The recipe of the layers. Without a recipe, the layers do not use FP8 and compute in the dtype of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Fp8Recipe>,
}

/// The FP8 formats of forward values (inputs and weights) and of gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Fp8Format {
    /// E4M3 for inputs and weights, and E5M2 for gradients. MXFP8 and blockwise scaling use E4M3 for gradients too.
    #[default]
    Hybrid,
    /// E4M3 for inputs, weights and gradients.
    E4m3,
}

/// The FP8 scaling recipe, which determines how the scales of tensors are computed.
///
/// A recipe is written as a name, or as a table with settings. Examples:
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
    /// Delayed scaling: one scale per tensor, computed from the largest magnitudes of the tensor in previous steps.
    Delayed(DelayedScaling),
    /// Current scaling: one scale per tensor, computed from the largest magnitude of the tensor itself.
    Current(CurrentScaling),
    /// Blockwise scaling: one scale per 1 x 128 block of activations and gradients, and per 128 x 128 block of weights.
    Blockwise(BlockScaling),
    /// MXFP8: one scale per 32 values. The scale is a power of two.
    MxFp8,
}

/// Settings of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DelayedScaling {
    /// The safety margin `m`: the largest magnitude is scaled to the largest value of the format divided by `2^m`.
    pub margin: i32,
    /// The number of previous steps whose largest magnitudes are kept in the history.
    pub history: usize,
    /// The algorithm that selects a magnitude from the history. The scale is computed from this magnitude.
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

/// The algorithm that selects a magnitude from the history. The scale is computed from this magnitude.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AmaxAlgorithm {
    /// The largest magnitude in the history.
    #[default]
    Max,
    /// The magnitude of the most recent step.
    MostRecent,
}

/// Settings of current scaling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CurrentScaling {
    /// A lower bound for the magnitude from which the scale is computed.
    pub epsilon: f32,
    /// Whether each scale is rounded down to a power of two.
    pub power_of_two: bool,
}

/// Settings of blockwise scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BlockScaling {
    /// Whether each scale is rounded down to a power of two.
    pub power_of_two: bool,
}

impl Default for BlockScaling {
    fn default() -> Self {
        Self { power_of_two: true }
    }
}

impl Fp8Format {
    /// Returns the formats of forward values and of gradients under the given recipe.
    pub fn of(self, recipe: &Fp8Recipe) -> [Format; 2] {
        match (self, recipe) {
            (Self::Hybrid, Fp8Recipe::Delayed(_) | Fp8Recipe::Current(_)) => {
                [Format::E4M3, Format::E5M2]
            }
            _ => [Format::E4M3; 2],
        }
    }
}
