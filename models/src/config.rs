//! The sizes and choices of a transformer.

use burn_megatron::nn::{Activation, NormKind};
use serde::{Deserialize, Serialize};

/// How the model knows where a token stands.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Positions {
    /// A learned vector per position, added to the embedding.
    Learned,
    /// Queries and keys are turned by an angle that grows with the position.
    Rotary {
        /// The base of the angles; 10,000 in Llama 2.
        base: f64,
    },
}

/// Configuration of a [`Transformer`](crate::Transformer).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransformerConfig {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// The vocabulary is padded to a multiple of this times the tensor size.
    pub vocabulary_divisible_by: usize,
    /// The longest sequence.
    pub context: usize,
    /// Features of the residual stream.
    pub hidden: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Groups of heads that share keys and values; as many as heads where not given.
    pub groups: Option<usize>,
    /// Features of a head; `hidden / heads` where not given.
    pub head_width: Option<usize>,
    /// Features inside of the MLP. Where not given `4 hidden`, or for a gated activation
    /// `8/3 hidden`, down to a multiple of 64 (at least 64).
    pub mlp_width: Option<usize>,
    /// The normalisation.
    pub norm: NormKind,
    /// Added to the variance.
    pub norm_epsilon: f64,
    /// The nonlinearity of the MLP.
    pub activation: Activation,
    /// How positions enter.
    pub positions: Positions,
    /// Whether linear layers have biases.
    pub bias: bool,
    /// Whether the output layer uses the embedding's weight.
    pub tied: bool,
    /// Dropout of the embedding and of each block's two outputs.
    pub dropout: f64,
    /// Dropout of the attention probabilities.
    pub attention_dropout: f64,
    /// Standard deviation of the initial weights; those before the residual stream are divided by
    /// `sqrt(2 layers)`, as in GPT-2.
    pub init_std: f64,
    /// Label smoothing of the loss.
    pub label_smoothing: f64,
}

impl Default for TransformerConfig {
    /// A small GPT-2 over bytes.
    fn default() -> Self {
        Self::gpt2()
    }
}

impl TransformerConfig {
    /// A small GPT-2 over bytes: LayerNorm, GELU, learned positions, tied output.
    pub fn gpt2() -> Self {
        Self {
            vocabulary: 256,
            vocabulary_divisible_by: 1,
            context: 128,
            hidden: 128,
            layers: 4,
            heads: 4,
            groups: None,
            head_width: None,
            mlp_width: None,
            norm: NormKind::Layer,
            norm_epsilon: 1e-5,
            activation: Activation::GeluTanh,
            positions: Positions::Learned,
            bias: true,
            tied: true,
            dropout: 0.0,
            attention_dropout: 0.0,
            init_std: 0.02,
            label_smoothing: 0.0,
        }
    }

    /// A small Llama over bytes: RMSNorm, SwiGLU, rotary positions, grouped queries, no biases.
    pub fn llama() -> Self {
        Self {
            groups: Some(2),
            norm: NormKind::Rms,
            activation: Activation::SwiGlu,
            positions: Positions::Rotary { base: 10_000.0 },
            bias: false,
            tied: false,
            ..Self::gpt2()
        }
    }

    pub(crate) fn groups(&self) -> usize {
        self.groups.unwrap_or(self.heads)
    }

    pub(crate) fn mlp_width(&self) -> usize {
        self.mlp_width.unwrap_or(match self.activation.is_gated() {
            true => (self.hidden * 8 / 3 / 64 * 64).max(64),
            false => self.hidden * 4,
        })
    }
}
