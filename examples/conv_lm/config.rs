//! The settings of the model, as a recipe has them in `[model]` beside `family = "conv"`.

use std::num::NonZeroUsize;

use burn_megatron::model::{ModelConfig, StageBuilder};
use burn_megatron::nn::BuildError;
use serde::{Deserialize, Serialize};

use crate::model::ConvLm;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
mod tests {
    use burn_megatron::choice::KernelChoices;
    use burn_megatron::data_parallel::{DataParallelConfig, Precision};
    use burn_megatron::kernels::record::ShapeSettings;
    use burn_megatron::mesh::ParallelConfig;
    use burn_megatron::nn::RecomputeConfig;
    use burn_megatron::nn::fp8::Fp8Config;
    use burn_megatron::plan::memory::{MemoryRequest, plan_memory};

    use super::*;

    /// The memory of every pipeline rank is planned, in each type.
    #[test]
    fn the_memory_of_the_model_is_planned() {
        for precision in [Precision::F64, Precision::F32, Precision::Bf16] {
            let sharding = DataParallelConfig {
                precision,
                ..DataParallelConfig::default()
            };
            let layout = ParallelConfig::new().with_pipeline(2).with_data(2);
            let request = MemoryRequest {
                layout: &layout,
                ranks: 4,
                micro_batch_size: 2,
                sequence_length: 16,
                micro_batches: 2,
                sharding: &sharding,
                kernels: &KernelChoices::default(),
                fp8: &Fp8Config::default(),
                lora: None,
                recompute: &RecomputeConfig::default(),
                settings: ShapeSettings::default(),
                slack: 1.0,
            };
            let report = plan_memory(&ConvLmConfig::default(), &request).unwrap();
            for rank in &report.ranks {
                assert!(rank.peak.activations > 0, "{precision}: {:?}", rank.peak);
            }
        }
    }
}
