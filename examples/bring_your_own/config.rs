//! The sizes of both models, and what makes them a `ModelConfig`. What the plain model does not need is marked
//! `//*`, as in `parallel.rs`.

use burn_megatron::mesh::{Axis, ParallelConfig, split_evenly}; //*
use burn_megatron::model::{ModelConfig, StageBuilder, check_without_experts}; //*
use burn_megatron::nn::BuildError; //*
use schemars::JsonSchema; //*
use serde::{Deserialize, Serialize}; //*

use crate::parallel::ParallelGpt; //*

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)] //*
#[serde(default, deny_unknown_fields)] //*
pub struct GptConfig {
    pub vocabulary: usize,
    pub context: usize,
    pub hidden: usize,
    pub heads: usize,
    pub layers: usize,
}

impl Default for GptConfig {
    fn default() -> Self {
        Self {
            vocabulary: 40,
            context: 16,
            hidden: 32,
            heads: 4,
            layers: 8,
        }
    }
}

/// From this every rank builds its part; `init` returns it. //*
impl ModelConfig for GptConfig {
    type Model = ParallelGpt;

    fn layers(&self) -> usize {
        self.layers
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn context(&self) -> usize {
        self.context
    }

    fn build(&self, stages: &StageBuilder) -> Result<ParallelGpt, BuildError> {
        ParallelGpt::new(self, stages)
    }

    /// The default implementation only allows layouts without tensor parallelism. These layers require that the number
    /// of tensor ranks divides the number of heads.
    fn check_layout(&self, layout: &ParallelConfig) -> Result<(), BuildError> {
        split_evenly("heads", self.heads, Axis::Tensor, layout.tensor)?;
        check_without_experts(layout)
    }
}

#[cfg(test)]
#[path = "../planned.rs"]
mod planned;

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use burn_megatron::comm::ParallelContext;
    use burn_megatron::mesh::Mesh;
    use burn_megatron::nn::{RecomputeConfig, RecomputeModule};

    use super::*;

    /// The memory of every pipeline rank is planned, in each type and with recomputation.
    #[test]
    fn the_memory_of_the_model_is_planned() {
        for recompute in [
            RecomputeConfig::default(),
            RecomputeConfig::selective([RecomputeModule::Norm]),
        ] {
            planned::in_each_type(&GptConfig::default(), &recompute);
        }
    }

    /// Attention only covers the tokens of one rank, and the `check_layout` of this model does not check the axis.
    #[test]
    fn ranks_that_share_sequences_are_refused() {
        let layout = ParallelConfig::new().with_context(2).with_data(1);
        let config = GptConfig::default();
        config.check_layout(&layout).unwrap();
        let mesh = Mesh::new(&layout, 2).unwrap();
        let ctx = ParallelContext::offline(mesh, 0).unwrap();
        let error = config.init(&ctx, &Device::flex()).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("invalid context = 2: expected 1"),
            "{error}"
        );
    }
}
