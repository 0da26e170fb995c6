//! The specification of a layer: plain data from which a block is built.

use burn_megatron::nn::moe::MoeMlpConfig;
use burn_megatron::nn::{
    Init, MultiLatentAttentionConfig, NormConfig, ParallelAttentionConfig, ParallelMlpConfig,
};
use serde::{Deserialize, Serialize};

use crate::TransformerConfig;

/// Specification of a layer of a [`Transformer`](crate::Transformer). `S` is the specification of its mixer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerSpec<S = MixerSpec> {
    /// The mixer, which mixes the tokens of a sequence.
    pub mixer: S,
    /// The feed-forward part, which computes each token independently.
    pub feed_forward: FeedForwardSpec,
    /// The norm of the input of each part.
    pub norm: NormConfig,
    /// Whether the outputs of both parts are normalized before they are added to the residual stream.
    pub post_norms: bool,
    /// Dropout probability of the outputs of both parts.
    pub dropout: f64,
}

/// Specification of a [`StandardMixer`](crate::StandardMixer).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum MixerSpec {
    /// Attention with keys and values per head or per group of heads.
    Attention(ParallelAttentionConfig),
    /// Multi-head latent attention.
    Latent(MultiLatentAttentionConfig),
}

/// Specification of a [`FeedForward`](crate::FeedForward).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FeedForwardSpec {
    /// An MLP.
    Dense(ParallelMlpConfig),
    /// A mixture of experts.
    Experts(MoeMlpConfig),
}

impl<S> LayerSpec<S> {
    /// Returns the layer with a different mixer, which `change` creates from the mixer of this layer.
    pub fn map_mixer<T>(self, change: impl FnOnce(S) -> T) -> LayerSpec<T> {
        LayerSpec {
            mixer: change(self.mixer),
            feed_forward: self.feed_forward,
            norm: self.norm,
            post_norms: self.post_norms,
            dropout: self.dropout,
        }
    }

    /// Returns whether the layer has experts.
    pub fn has_experts(&self) -> bool {
        matches!(self.feed_forward, FeedForwardSpec::Experts(_))
    }
}

impl TransformerConfig {
    /// Returns the specification of layer `number` of the complete model.
    ///
    /// ```
    /// use burn_megatron_models::{MixerSpec, TransformerConfig};
    ///
    /// // The first block of this small DeepSeek-V3 has no experts.
    /// let config = TransformerConfig::deepseek();
    /// assert!(!config.layer(0).has_experts());
    /// assert!(config.layer(1).has_experts());
    /// assert!(matches!(config.layer(1).mixer, MixerSpec::Latent(_)));
    /// ```
    pub fn layer(&self, number: usize) -> LayerSpec {
        LayerSpec {
            mixer: self.mixer(number),
            feed_forward: self.feed_forward(number),
            norm: self.norm(),
            post_norms: self.post_norms,
            dropout: self.dropout,
        }
    }

    fn mixer(&self, number: usize) -> MixerSpec {
        let (init, output_init) = self.inits();
        if let Some(mla) = &self.mla {
            let latent = mla.layer(self).with_init(init);
            return MixerSpec::Latent(latent.with_output_init(output_init));
        }
        let (groups, head_width) = (self.groups(), self.width_of_heads());
        let attention = ParallelAttentionConfig::new(self.hidden, self.heads, groups, head_width)
            .with_bias(self.has_output_bias())
            .with_qkv_bias(self.has_qkv_bias())
            .with_qk_norm(self.qk_norm())
            .with_window(self.window_of(number))
            .with_sinks(self.sinks)
            .with_scale(self.attention_scale)
            .with_soft_cap(self.attention_soft_cap)
            .with_dropout(self.attention_dropout)
            .with_sequence(self.context)
            .with_init(init)
            .with_output_init(output_init);
        MixerSpec::Attention(attention)
    }

    fn feed_forward(&self, number: usize) -> FeedForwardSpec {
        let (init, output_init) = self.inits();
        match self.moe.as_ref().filter(|moe| moe.is_in(number)) {
            Some(moe) => {
                let experts = moe.layer(self).with_init(init);
                FeedForwardSpec::Experts(experts.with_output_init(output_init))
            }
            None => {
                let mlp = ParallelMlpConfig::new(self.hidden, self.mlp_width(), self.activation)
                    .with_bias(self.bias)
                    .with_init(init)
                    .with_output_init(output_init);
                FeedForwardSpec::Dense(mlp)
            }
        }
    }

    /// Returns the initializations of input projections and of output projections.
    fn inits(&self) -> (Init, Init) {
        let scale = match self.scaled_output_init {
            true => (2.0 * self.layers as f64).sqrt(),
            false => 1.0,
        };
        (
            Init::Normal(self.init_std),
            Init::Normal(self.init_std / scale),
        )
    }
}

#[cfg(test)]
#[path = "layer_spec_tests.rs"]
mod tests;
