//! The settings of the model, in the table `[model]` of a recipe with `family = "conv"`.

use std::num::NonZeroUsize;

use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{ModelConfig, RoundingSizes, StageBuilder, check_context};
use burn_megatron::nn::BuildError;
use burn_megatron_models::{LayerSpec, Transformer, TransformerConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::mixer::{GatedConvConfig, HybridMixer, HybridSpec};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ConvLmConfig {
    /// The vocabulary size.
    pub vocabulary: usize,
    /// The maximum sequence length.
    pub context: usize,
    /// The width of a layer.
    pub hidden: usize,
    /// The number of layers.
    pub layers: usize,
    /// The number of heads of a layer with attention.
    pub heads: usize,
    /// Every layer whose number is a multiple of this has attention, the other layers have a convolution. Layers are
    /// counted from 1.
    pub attention_every: NonZeroUsize,
    /// The kernel size: the number of tokens in a convolution, including the current token.
    pub kernel: NonZeroUsize,
}

impl Default for ConvLmConfig {
    fn default() -> Self {
        Self {
            vocabulary: 256,
            context: 64,
            hidden: 32,
            layers: 4,
            heads: 4,
            attention_every: const { NonZeroUsize::new(4).unwrap() },
            kernel: const { NonZeroUsize::new(4).unwrap() },
        }
    }
}

impl ConvLmConfig {
    /// Returns the same model with attention in every layer: a Llama.
    fn transformer(&self) -> TransformerConfig {
        TransformerConfig {
            vocabulary: self.vocabulary,
            context: self.context,
            hidden: self.hidden,
            layers: self.layers,
            heads: self.heads,
            groups: None,
            ..TransformerConfig::llama()
        }
    }

    fn has_attention(&self, number: usize) -> bool {
        (number + 1).is_multiple_of(self.attention_every.get())
    }
}

impl ModelConfig for ConvLmConfig {
    type Model = Transformer<HybridMixer>;

    fn layers(&self) -> usize {
        self.layers
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn context(&self) -> usize {
        self.context
    }

    fn layer_kind(&self, number: usize) -> usize {
        usize::from(self.has_attention(number))
    }

    fn build(&self, stages: &StageBuilder) -> Result<Self::Model, BuildError> {
        let model = self.transformer();
        let conv = GatedConvConfig {
            hidden: self.hidden,
            kernel: self.kernel.get(),
        };
        let layer = |number: usize| -> LayerSpec<HybridSpec> {
            model
                .layer(number)
                .map_mixer(|attention| match self.has_attention(number) {
                    true => HybridSpec::Standard(attention),
                    false => HybridSpec::Conv(conv.clone()),
                })
        };
        Transformer::with_layers(&model, layer, stages)
    }

    /// Rejects context parallelism: a convolution would need the last tokens of the previous rank.
    fn check_layout(&self, layout: &ParallelConfig) -> Result<(), BuildError> {
        check_context(self, layout)?;
        self.transformer().check_layout(layout)
    }

    fn table_bytes(&self) -> u128 {
        self.transformer().table_bytes()
    }

    fn rounding_sizes(&self) -> RoundingSizes {
        self.transformer().rounding_sizes()
    }
}

#[cfg(test)]
#[path = "../planned.rs"]
mod planned;

#[cfg(test)]
mod tests {
    use burn_megatron::nn::RecomputeConfig;

    use super::*;

    /// The memory of every pipeline rank is planned, in each type.
    #[test]
    fn the_memory_of_the_model_is_planned() {
        planned::in_each_type(&ConvLmConfig::default(), &RecomputeConfig::default());
    }
}
