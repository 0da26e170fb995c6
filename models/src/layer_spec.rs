//! The specification of a layer, from which a transformer block is built.

use burn_megatron::nn::moe::MoeMlpConfig;
use burn_megatron::nn::{
    Init, MultiLatentAttentionConfig, NormConfig, ParallelAttentionConfig, ParallelMlpConfig,
};
use serde::{Deserialize, Serialize};

use crate::TransformerConfig;

/// Specification of a layer of a [`Transformer`](crate::Transformer). `S` is the type of the mixer specification.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerSpec<S = MixerSpec> {
    /// The specification of the mixer, which mixes the tokens of a sequence (for example attention).
    pub mixer: S,
    /// The specification of the feed-forward part, which processes each token independently.
    pub feed_forward: FeedForwardSpec,
    /// The norm at the input of the mixer and at the input of the feed-forward part.
    pub norm: NormConfig,
    /// Whether the outputs of the mixer and the feed-forward part are normalized before they are added to the residual
    /// stream.
    pub post_norms: bool,
    /// Dropout probability of the outputs of the mixer and the feed-forward part.
    pub dropout: f64,
}

/// Specification of a [`StandardMixer`](crate::StandardMixer).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum MixerSpec {
    /// Multi-head or grouped-query attention.
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
    /// Replaces the mixer specification of the layer. `change` converts the current mixer specification to the new one.
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
    /// Returns the specification of layer `number`, counted from 0 over all pipeline stages.
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
