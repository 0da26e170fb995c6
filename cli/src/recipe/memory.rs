//! The `[memory]` table of a recipe: settings that save memory.

use burn_megatron::data_parallel::OffloadConfig;
use burn_megatron::nn::{ActivationOffload, RecomputeConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::byte_size;

/// Table `[memory]` of a recipe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfig {
    /// The layers whose activations are recomputed in the backward (activation checkpointing).
    pub recompute: RecomputeConfig,
    /// The optimizer state and the activations that are offloaded to host memory.
    pub offload: OffloadTable,
}

/// Table `[memory.offload]` of a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OffloadTable {
    /// The fraction of the optimizer state that is held in host memory and updated on the CPU, from 0 to 1. It is
    /// rounded to a whole number of gradient buckets.
    pub optimizer: f64,
    /// The maximum size of the activations per rank that are offloaded to host memory, such as 2GiB. Only the inputs of
    /// recomputed blocks are offloaded.
    #[schemars(extend("value" = "BYTES"))]
    #[serde(deserialize_with = "byte_size::deserialize")]
    pub activations: u64,
    /// The number of blocks whose offloaded inputs are copied back to the device ahead of time, before the backward
    /// reaches these blocks.
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

#[cfg(test)]
mod tests {
    use crate::recipe::parsed;

    #[test]
    fn a_recipe_may_write_bytes_with_a_unit() {
        for (value, bytes) in [("\"2GiB\"", 2 << 30), ("4096", 4096), ("0", 0)] {
            let read = parsed(&format!("[memory.offload]\nactivations = {value}"));
            assert_eq!(read.unwrap().memory.offload.activations, bytes, "{value}");
        }
        for (value, says) in [
            ("\"2 apples\"", "invalid size \"2 apples\""),
            ("-1", "expected a number of bytes, or text such as \"2GiB\""),
            ("true", "expected a number of bytes"),
        ] {
            let error = parsed(&format!("[memory.offload]\nactivations = {value}"));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(says), "{value}: {error}");
        }
    }
}
