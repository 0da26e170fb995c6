//! The settings of the model, as a recipe has them in `[model]` beside `family = "conv"`.

use std::num::NonZeroUsize;

use burn_megatron::model::{ModelConfig, StageBuilder};
use burn_megatron::nn::BuildError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::ConvLm;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ConvLmConfig {
    pub vocabulary: usize,
    pub context: usize,
    pub hidden: usize,
    pub layers: usize,
    /// The tokens that a convolution sees: its own and those before it.
    pub kernel: NonZeroUsize,
}

impl Default for ConvLmConfig {
    fn default() -> Self {
        Self {
            vocabulary: 256,
            context: 64,
            hidden: 32,
            layers: 4,
            kernel: const { NonZeroUsize::new(4).unwrap() },
        }
    }
}

impl ModelConfig for ConvLmConfig {
    type Model = ConvLm;

    fn layers(&self) -> usize {
        self.layers
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn context(&self) -> usize {
        self.context
    }

    fn build(&self, stages: &StageBuilder) -> Result<ConvLm, BuildError> {
        ConvLm::new(self, stages)
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
