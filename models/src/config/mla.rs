//! Latent attention of a transformer.

use burn_megatron::nn::{BuildError, MultiLatentAttentionConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Positions, TransformerConfig, refused};
use crate::RotaryScaling;

/// Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434), which replaces attention with keys and values per
/// head: see [`MultiLatentAttention`](burn_megatron::nn::MultiLatentAttention).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MlaConfig {
    /// The rank of the query latent (`q_lora_rank`); by default queries have no latent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q_rank: Option<usize>,
    /// The rank of the key-value latent (`kv_lora_rank`).
    #[schemars(extend("resume" = "never"))]
    pub kv_rank: usize,
    /// The number of features of a query or key without rotary position (`qk_nope_head_dim`).
    #[schemars(extend("resume" = "never"))]
    pub nope_width: usize,
    /// The number of features of a query or key with rotary position (`qk_rope_head_dim`), an even number.
    #[schemars(extend("resume" = "never"))]
    pub rope_width: usize,
    /// The number of features of a value (`v_head_dim`).
    #[schemars(extend("resume" = "never"))]
    pub value_width: usize,
    /// The epsilon of the norms of latents.
    #[serde(default = "norm_epsilon")]
    pub norm_epsilon: f64,
}

fn norm_epsilon() -> f64 {
    1e-6
}

impl MlaConfig {
    /// Returns the number of features of a query or a key.
    pub fn head_width(&self) -> usize {
        self.nope_width + self.rope_width
    }

    /// Returns the sizes that must be above 0.
    pub(crate) fn sizes(&self) -> [(&'static str, usize); 5] {
        [
            ("mla.q_rank", self.q_rank.unwrap_or(1)),
            ("mla.kv_rank", self.kv_rank),
            ("mla.nope_width", self.nope_width),
            ("mla.rope_width", self.rope_width),
            ("mla.value_width", self.value_width),
        ]
    }

    /// Checks the settings that latent attention requires or does not support.
    pub(crate) fn check(&self, model: &TransformerConfig) -> Result<(), BuildError> {
        let is_rotary = matches!(model.positions, Positions::Rotary { .. });
        let conditions = [
            ("positions", "rotary ones", is_rotary),
            (
                "groups",
                "none, because each head has its own keys and values",
                model.groups.is_none_or(|groups| groups == model.heads),
            ),
            (
                "head_width",
                "none, because mla.nope_width and mla.rope_width are its parts",
                model.head_width.is_none(),
            ),
            (
                "windows",
                "none",
                model.windows().iter().all(Option::is_none),
            ),
            ("qk_norm", "none", model.qk_norm.is_none()),
            ("sinks", "false", !model.sinks),
            (
                "attention_scale and attention_soft_cap",
                "none, because the scale follows from the widths and YaRN",
                model.attention_scale.is_none() && model.attention_soft_cap.is_none(),
            ),
            ("local_base", "none", model.local_base.is_none()),
            (
                "bias, qkv_bias and output_bias",
                "false",
                !model.bias && !model.has_qkv_bias() && !model.has_output_bias(),
            ),
            (
                "mla.rope_width",
                "an even number",
                self.rope_width.is_multiple_of(2),
            ),
            (
                "mla.norm_epsilon",
                "above 0 and finite in f32",
                self.norm_epsilon as f32 > 0.0 && (self.norm_epsilon as f32).is_finite(),
            ),
        ];
        match conditions.into_iter().find(|(.., fits)| !fits) {
            None => Ok(()),
            Some((name, expected, _)) => Err(refused(format!(
                "invalid {name} with latent attention: expected {expected}"
            ))),
        }
    }

    /// Returns an upper bound of the number of weights of a layer's matrices, divided by `hidden`. Latents are counted
    /// as if they were as wide as the residual stream.
    pub(crate) fn columns(&self, heads: usize) -> u128 {
        let [heads, q_rank, kv_rank] =
            [heads, self.q_rank.unwrap_or(0), self.kv_rank].map(|n| n as u128);
        let [width, nope, rope, value] = [
            self.head_width(),
            self.nope_width,
            self.rope_width,
            self.value_width,
        ]
        .map(|n| n as u128);
        q_rank + kv_rank + rope + heads * (width + nope + 2 * value)
    }

    /// Returns the factor of the attention scores: `1 / sqrt(head_width)`. With YaRN it is multiplied by the square of
    /// `0.1 mscale_all_dim ln(factor) + 1`.
    pub(crate) fn scale(&self, positions: &Positions) -> f64 {
        let plain = 1.0 / (self.head_width() as f64).sqrt();
        match positions {
            Positions::Rotary {
                scaling:
                    RotaryScaling::Yarn {
                        factor,
                        mscale_all_dim,
                        ..
                    },
                ..
            } => plain * (0.1 * mscale_all_dim * factor.ln() + 1.0).powi(2),
            _ => plain,
        }
    }

    /// Returns the configuration of the attention layer of a block.
    pub(crate) fn layer(&self, model: &TransformerConfig) -> MultiLatentAttentionConfig {
        MultiLatentAttentionConfig::new(
            model.hidden,
            model.heads,
            self.kv_rank,
            self.nope_width,
            self.rope_width,
            self.value_width,
        )
        .with_q_rank(self.q_rank)
        .with_norm_epsilon(self.norm_epsilon)
        .with_scale(Some(self.scale(&model.positions)))
        .with_dropout(model.attention_dropout)
    }
}

#[cfg(test)]
#[path = "mla_tests.rs"]
mod tests;
