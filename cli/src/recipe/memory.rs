//! The `[memory]` table of a recipe: the settings that save memory.

use burn_megatron::data_parallel::OffloadConfig;
use burn_megatron::nn::{ActivationOffload, RecomputeConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[memory]` of a recipe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfig {
    /// The layers that are recomputed in the backward.
    pub recompute: RecomputeConfig,
    /// The state that is kept in the memory of the host.
    pub offload: OffloadTable,
}

/// `[memory.offload]` of a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OffloadTable {
    /// The fraction of the optimizer state, by bytes, that is kept in the memory of the host and stepped on its CPU: 0 to 1,
    /// in whole buckets.
    pub optimizer: f64,
    /// The maximum number of bytes of a rank, as in 2GiB, of the inputs of recomputed blocks that are kept in the memory of
    /// the host from the forward to the backward.
    #[schemars(extend("value" = "BYTES"))]
    pub activations: u64,
    /// The number of blocks ahead of the backward for which inputs are fetched from the host.
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
    /// The optimizer state on the host.
    pub fn offload(&self) -> OffloadConfig {
        OffloadConfig {
            optimizer: self.offload.optimizer,
        }
    }

    /// Returns the settings of recomputation, with the inputs that are on the host.
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
