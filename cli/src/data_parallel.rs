//! Checks that the settings of data parallelism fit the layout.

use burn_megatron::data_parallel::{Moments, Precision, ZeroStage};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;

use crate::error::Error;
use crate::memory::not_fused_adamw;
use crate::recipe::Recipe;

/// Parses a compute type. PyTorch's names are accepted too.
pub fn precision(text: &str) -> Result<Precision, ValueError> {
    let text = match text {
        "fp64" | "float64" => "f64",
        "fp32" | "float32" => "f32",
        "bfloat16" => "bf16",
        "fp16" | "float16" => "f16",
        text => text,
    };
    let text: serde::de::value::StrDeserializer<'_, ValueError> = text.into_deserializer();
    Precision::deserialize(text)
}

/// Checks that each setting has an effect in the layout of a recipe. `DataParallelConfig::check` finds the errors
/// that do not depend on the layout.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let (config, parallel) = (&recipe.data_parallel, &recipe.parallel);
    if config.zero_stage > ZeroStage::Replicated && parallel.data_parallel_size() == 1 {
        return Err(format!(
            "zero_stage = {} requires data parallelism, but data = 1: set data (--dp) to 2 or more, or zero_stage to 0",
            config.zero_stage,
        )
        .into());
    }
    if let Some(name) = config.unused_sharding(parallel.data_parallel_size()) {
        return Err(format!(
            "{name} requires sharding groups of 2 or more ranks, and hsdp = 1; set hsdp to 2 or more, or remove {name}"
        )
        .into());
    }
    if recipe.train.check_replicas_every.is_some() {
        // For a pipeline, the existence of replicas depends on the model: see `RankEstimates`.
        let one_stage = parallel.pipeline == 1 && parallel.tensor == 1;
        if one_stage && !has_data_replicas(recipe) {
            return Err(NO_REPLICAS.into());
        }
    }
    match not_fused_adamw(recipe).filter(|_| config.moments == Moments::Bf16) {
        Some(own) => Err(format!(
            "moments = \"bf16\" requires the fused AdamW, but {own}; change it, or remove moments"
        )
        .into()),
        None => Ok(()),
    }
}

/// The error for replica checks without replicas.
pub const NO_REPLICAS: &str =
    "check_replicas_every requires replicated weights, and this layout has none; remove it";

/// Returns whether several ranks of the data axis hold the same shard of a parameter.
pub fn has_data_replicas(recipe: &Recipe) -> bool {
    let data = recipe.parallel.data_parallel_size();
    recipe.data_parallel.shard_ranks(data) < data
}

#[cfg(test)]
#[path = "data_parallel_tests.rs"]
mod tests;
