//! The configuration of a transformer.

use burn_megatron::kernels::rope::RopeConfig;
use burn_megatron::nn::{Activation, BuildError, NormConfig, NormKind, QkNorm};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod check;
mod layers;
mod mla;
mod moe;
mod mtp;
mod positions;
mod qk_norm_setting;
mod scaling;
#[cfg(test)]
mod tests;

pub use mla::MlaConfig;
pub use moe::MoeConfig;
pub use mtp::MtpConfig;
pub use positions::Positions;

/// The maximum of any size, so that products of two sizes do not overflow.
pub(crate) const MAX_SIZE: usize = 1 << 30;

/// Configuration of a [`Transformer`](crate::Transformer).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TransformerConfig {
    /// The vocabulary size.
    pub vocabulary: usize,
    /// A divisor of the padded vocabulary size. The vocabulary is padded to a multiple of this number times the
    /// tensor-parallel size.
    #[schemars(extend("resume" = "may_differ"))]
    pub vocabulary_divisible_by: usize,
    /// The maximum sequence length.
    pub context: usize,
    /// The width of the residual stream.
    #[schemars(extend("resume" = "never"))]
    pub hidden: usize,
    /// The number of blocks.
    pub layers: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key-value groups (grouped-query attention); by default the number of heads.
    pub groups: Option<usize>,
    /// The width of a head; by default `hidden / heads`.
    pub head_width: Option<usize>,
    /// The inner width of the MLP. The default is `4 hidden`. With a gated activation, the default is `8/3 hidden`,
    /// rounded down to a multiple of 64 and at least 64.
    pub mlp_width: Option<usize>,
    /// The kind of normalization layer.
    pub norm: NormKind,
    /// The epsilon of the normalization layers, which is added to the variance.
    pub norm_epsilon: f64,
    /// Whether each norm stores its weight minus 1. Weight decay then pulls the weights towards 1.
    pub norm_zero_centered: bool,
    /// The activation function of the MLP.
    pub activation: Activation,
    /// The position embedding.
    pub positions: Positions,
    /// Whether linear layers have a bias.
    pub bias: bool,
    /// Whether the query, key and value projections have biases; by default the value of `bias`.
    pub qkv_bias: Option<bool>,
    /// Whether the output projection of attention has a bias; by default the value of `bias`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_bias: Option<bool>,
    /// RMSNorm of queries and keys, which is computed per head (as in Qwen 3) or over all heads (as in OLMoE). By
    /// default, queries and keys are not normalized. In a recipe, `true` means per head.
    #[serde(with = "qk_norm_setting")]
    #[schemars(schema_with = "qk_norm_setting::schema")]
    pub qk_norm: Option<QkNorm>,
    /// Whether the query and key norms store their weights minus 1, as in Gemma 3.
    pub qk_norm_zero_centered: bool,
    /// The size of the sliding attention window in tokens, including the query token, as in Mistral. By default, a
    /// token attends to all previous tokens.
    pub window: Option<usize>,
    /// The sliding windows of the layers, as in gpt-oss and Gemma. The list is repeated until it covers all layers. 0
    /// means no window. By default, all layers use `window`.
    pub layer_windows: Vec<usize>,
    /// The base of the rotary embedding in layers with a sliding window, as in Gemma 3. These layers then use no RoPE
    /// scaling. By default, all layers use the same base.
    pub local_base: Option<f64>,
    /// Whether attention has an attention sink, as in gpt-oss: a learned logit per head that is added to the softmax
    /// denominator.
    pub sinks: bool,
    /// The scale factor of the attention scores; by default `1 / sqrt(head_width)`.
    pub attention_scale: Option<f64>,
    /// The soft cap `c` of the attention scores: a scaled score `s` becomes `c tanh(s / c)`, as in Gemma 2.
    pub attention_soft_cap: Option<f64>,
    /// The soft cap `c` of the output logits: a logit `s` becomes `c tanh(s / c)`.
    pub logit_soft_cap: Option<f64>,
    /// Whether the outputs of attention and the MLP are normalized before they are added to the residual stream, as in
    /// Gemma 2 and 3.
    pub post_norms: bool,
    /// Whether the embedding is multiplied by `sqrt(hidden)`, as in Gemma. The factor is rounded to the dtype of the
    /// model.
    pub scaled_embedding: bool,
    /// Whether the output layer shares the weight of the embedding.
    pub tied: bool,
    /// Dropout probability of the embedding output, the attention outputs and the MLP outputs.
    pub dropout: f64,
    /// Dropout probability of the attention probabilities.
    pub attention_dropout: f64,
    /// The standard deviation of the normal distribution from which the weights are initialized.
    pub init_std: f64,
    /// Whether `init_std` is divided by `sqrt(2 layers)` for the output projections of attention and MLPs, as in GPT-2.
    pub scaled_output_init: bool,
    /// The label smoothing factor of the cross-entropy loss.
    pub label_smoothing: f64,
    /// The coefficient of the z-loss, which adds the squared log-sum-exp of the logits to the loss.
    pub z_loss: f64,
    /// Multi-head latent attention (MLA). By default, the model uses multi-head or grouped-query attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mla: Option<MlaConfig>,
    /// Mixture of experts (MoE), which replaces MLPs. By default, the model has no experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moe: Option<MoeConfig>,
    /// Multi-token prediction (MTP). By default, the model predicts only the next token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtp: Option<MtpConfig>,
}

impl Default for TransformerConfig {
    /// Returns a small byte-level GPT-2.
    fn default() -> Self {
        Self::gpt2()
    }
}

impl TransformerConfig {
    /// Returns the configuration of a small byte-level GPT-2, with LayerNorm, GELU, learned positions and a tied output
    /// layer.
    ///
    /// The example checks that a small GPT-2 computes the same results on two ranks as on one rank:
    ///
    /// ```
    /// use burn_megatron_models::TransformerConfig;
    /// use burn_megatron_verify::{Layout, ModelSubject, VerifyOptions, verify};
    ///
    /// let config = TransformerConfig {
    ///     vocabulary: 32,
    ///     context: 8,
    ///     hidden: 16,
    ///     layers: 2,
    ///     ..TransformerConfig::gpt2()
    /// };
    /// let layouts: [Layout; 2] = ["tp2".parse()?, "dp2".parse()?];
    /// let options = VerifyOptions { steps: 2, ..VerifyOptions::default() };
    /// let report = verify(&ModelSubject::new(config), &layouts, &options)?;
    /// assert!(report.passes(), "{report}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
            norm_zero_centered: false,
            activation: Activation::GeluTanh,
            positions: Positions::Learned,
            bias: true,
            qkv_bias: None,
            output_bias: None,
            qk_norm: None,
            qk_norm_zero_centered: false,
            window: None,
            layer_windows: vec![],
            local_base: None,
            sinks: false,
            attention_scale: None,
            attention_soft_cap: None,
            logit_soft_cap: None,
            post_norms: false,
            scaled_embedding: false,
            tied: true,
            dropout: 0.0,
            attention_dropout: 0.0,
            init_std: 0.02,
            scaled_output_init: true,
            label_smoothing: 0.0,
            z_loss: 0.0,
            mla: None,
            moe: None,
            mtp: None,
        }
    }

    /// Returns the configuration of a small byte-level Llama, with RMSNorm, SwiGLU, rotary positions, grouped-query
    /// attention and no biases.
    ///
    /// The example trains a small Llama on two ranks with tensor parallelism:
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use burn_megatron_data::TextDocuments;
    /// use burn_megatron_models::TransformerConfig;
    /// use burn_megatron_train::prelude::*;
    ///
    /// let config = TransformerConfig { context: 16, hidden: 32, layers: 2, ..TransformerConfig::llama() };
    /// let mut documents = TextDocuments::default();
    /// documents.push(b"a.txt", "to be or not to be. ".repeat(50).as_bytes());
    /// let text = TextData::from_documents("memory".as_ref(), documents)?;
    /// let settings = TrainConfig {
    ///     steps: 3,
    ///     warmup_steps: 1,
    ///     held_out_samples: 2,
    ///     ..TrainConfig::default()
    /// };
    /// let layout = ParallelConfig::new().with_tensor(2);
    /// let steps = World::threads(2)?.run(|rank| {
    ///     let (groups, device) = (ParallelContext::new(&layout, &rank)?, Device::flex());
    ///     let model = config.init(&groups, &device)?;
    ///     let mut trainer = Trainer::new(model, &groups, &device, &settings)?;
    ///     Ok::<_, AnyError>(trainer.fit(&text, &mut NoopObserver)?.steps)
    /// })?;
    /// assert_eq!(steps, [3, 3]);
    /// # Ok::<(), AnyError>(())
    /// ```
    pub fn llama() -> Self {
        Self {
            groups: Some(2),
            norm: NormKind::Rms,
            activation: Activation::SwiGlu,
            positions: Positions::rotary(10_000.0),
            bias: false,
            tied: false,
            ..Self::gpt2()
        }
    }

    /// Returns the configuration of a small byte-level Mixtral: a Llama with experts in place of MLPs. Each token uses
    /// two of eight experts.
    pub fn mixtral() -> Self {
        Self {
            moe: Some(MoeConfig::default()),
            ..Self::llama()
        }
    }

    /// Returns the configuration of a small byte-level DeepSeek-V3. It has latent attention, and experts in all blocks
    /// after the first block. The router selects experts by the sigmoid of their scores, within the best expert groups.
    /// A shared expert processes all tokens.
    pub fn deepseek() -> Self {
        Self {
            groups: None,
            mlp_width: Some(256),
            init_std: 0.006,
            scaled_output_init: false,
            mla: Some(MlaConfig {
                q_rank: Some(48),
                kv_rank: 32,
                nope_width: 32,
                rope_width: 16,
                value_width: 32,
                norm_epsilon: 1e-6,
            }),
            moe: Some(MoeConfig::deepseek()),
            ..Self::llama()
        }
    }

    /// Returns whether the query, key and value projections have biases.
    pub(crate) fn has_qkv_bias(&self) -> bool {
        self.qkv_bias.unwrap_or(self.bias)
    }

    /// Returns whether the output projection of attention has a bias.
    pub(crate) fn has_output_bias(&self) -> bool {
        self.output_bias.unwrap_or(self.bias)
    }

    /// Returns the configuration of rotary positions, if the model has them.
    pub(crate) fn rope(&self, head_width: usize) -> Option<RopeConfig> {
        match &self.positions {
            Positions::Learned => None,
            Positions::Rotary { base, scaling } => Some(RopeConfig {
                width: self.mla.as_ref().map_or(head_width, |mla| mla.rope_width),
                max_positions: self.context,
                base: *base,
                scaling: scaling.clone(),
            }),
        }
    }

    /// Returns the width of a head. The sizes need not be checked before.
    pub(crate) fn width_of_heads(&self) -> usize {
        match &self.mla {
            Some(mla) => mla.head_width(),
            None => self.head_width.unwrap_or(self.hidden / self.heads.max(1)),
        }
    }

    pub(crate) fn norm(&self) -> NormConfig {
        NormConfig::new(self.norm, self.hidden, self.norm_epsilon)
            .with_zero_centered(self.norm_zero_centered)
    }

    pub(crate) fn groups(&self) -> usize {
        self.groups.unwrap_or(self.heads)
    }

    pub(crate) fn mlp_width(&self) -> usize {
        self.mlp_width.unwrap_or(if self.activation.is_gated() {
            (self.hidden * 8 / 3 / 64 * 64).max(64)
        } else {
            self.hidden * 4
        })
    }
}

pub(crate) fn refused(message: String) -> BuildError {
    BuildError::Config {
        path: "model".into(),
        message,
    }
}
