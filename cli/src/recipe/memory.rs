//! The `[memory]` table of a recipe: settings that save memory.

use burn_megatron::data_parallel::OffloadConfig;
use burn_megatron::nn::{ActivationOffload, RecomputeConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Table `[memory]` of a recipe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfig {
    /// The layers that are recomputed in the backward.
    pub recompute: RecomputeConfig,
    /// The state that is kept in host memory.
    pub offload: OffloadTable,
}

/// Table `[memory.offload]` of a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OffloadTable {
    /// The fraction of the optimizer state that is kept in host memory and updated on the CPU, from 0 to 1. The
    /// fraction is rounded to complete buckets.
    pub optimizer: f64,
    /// The maximum number of bytes per rank, such as 2GiB, of activations that are offloaded to host memory. Only the
    /// inputs of recomputed blocks are offloaded.
    #[schemars(extend("value" = "BYTES"))]
    pub activations: u64,
    /// The number of blocks whose inputs are fetched from the host before the backward reaches them.
    pub prefetch: usize,
}

impl Default for OffloadTable {
    fn default() -> Self {
        let ActivationOffload { bytes, prefetch } = ActivationOffload::default();
        Self {
            optimizer: OffloadConfig::default().optimizer,
            activations: bytes,
            prefetch,
        }
    }
}

impl MemoryConfig {
    /// Returns the settings for optimizer state on the host.
    pub fn offload(&self) -> OffloadConfig {
        OffloadConfig {
            optimizer: self.offload.optimizer,
        }
    }

    /// Returns the settings of recomputation, including the offload of block inputs to the host.
    pub fn recompute(&self) -> RecomputeConfig {
        let OffloadTable {
            activations: bytes,
            prefetch,
            ..
        } = self.offload;
        RecomputeConfig {
            offload: ActivationOffload { bytes, prefetch },
            ..self.recompute.clone()
        }
    }
}
