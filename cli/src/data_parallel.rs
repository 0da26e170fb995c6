//! Data parallelism: its flags, and the checks that its settings fit the layout.

use burn_megatron::data_parallel::{Moments, Precision, ZeroStage};
use burn_megatron::optim::LossScale;
use clap::Args;
use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;
use serde::{Deserialize, Deserializer};

use crate::error::Error;
use crate::memory::not_fused_adamw;
use crate::recipe::Recipe;

/// Flags of data parallelism; each overrides a key of `[data_parallel]`, the last three keys of `[train]`.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Data parallelism")]
pub struct DataParallelArgs {
    /// State that is sharded over the data-parallel ranks: 0 nothing, 1 the optimizer state, 2 also the gradients, 3
    /// also the parameters.
    #[arg(long, value_name = "0|1|2|3")]
    pub zero_stage: Option<ZeroStage>,
    /// Ranks per sharding group (hybrid sharding); all data-parallel ranks by default.
    #[arg(long, value_name = "N")]
    pub hsdp: Option<usize>,
    /// Sum gradients inside of nodes first, then between them; for --zero-stage 0 and --ranks-per-node.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub hierarchical_reduce: Option<bool>,
    /// The type that the model computes in. Master weights are f32, or f64 with f64, which is for --device cpu.
    #[arg(long, value_name = "f64|f32|bf16|f16", value_parser = precision, help_heading = "Precision")]
    pub precision: Option<Precision>,
    /// Reduce each bucket of gradients as soon as it is ready, during the backward; the default.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub overlap_grad_reduce: Option<bool>,
    /// Gather the updated parameters during the next forward; for --zero-stage 1 and 2.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub overlap_param_gather: Option<bool>,
    /// Elements per gradient bucket.
    #[arg(long, value_name = "ELEMENTS")]
    pub bucket_size: Option<usize>,
    /// Keep gathered parameters from the forward to the backward; for --zero-stage 3.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub keep_gathered: Option<bool>,
    /// Send gradients in the 16-bit type of --precision; they are still summed in f32.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub reduce_in_16_bits: Option<bool>,
    /// Norm above which a gradient bucket of a rank counts as not finite, and the step is skipped. To clip gradients is
    /// train.clip of the recipe.
    #[arg(long, value_name = "NORM")]
    pub gradient_limit: Option<f64>,
    /// Loss scale: none, dynamic or a number. By default dynamic for f16, none for other types.
    #[arg(long, value_name = "none|dynamic|NUMBER", value_parser = loss_scale, help_heading = "Precision")]
    pub loss_scale: Option<LossScale>,
    /// Steps between two checks that replicated weights are equal.
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub check_replicas_every: Option<usize>,
    /// Log the number of zeros in the gradient of each step.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Training")]
    pub log_num_zeros_in_grad: Option<bool>,
}

/// A type to compute in, as a flag has it, also by PyTorch's names.
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

fn loss_scale(text: &str) -> Result<LossScale, ValueError> {
    fn read<'de>(
        value: impl Deserializer<'de, Error = ValueError>,
    ) -> Result<LossScale, ValueError> {
        LossScale::deserialize(value)
    }
    match text.parse::<f64>() {
        Ok(number) => read(number.into_deserializer()),
        Err(_) => read(text.into_deserializer()),
    }
}

impl DataParallelArgs {
    /// Applies the flags to a recipe.
    pub fn apply(&self, recipe: &mut Recipe) {
        let config = &mut recipe.data_parallel;
        if let Some(stage) = self.zero_stage {
            config.zero_stage = stage;
            if stage == ZeroStage::Replicated {
                // The sharding settings of the recipe no longer apply.
                config.hsdp = None;
                config.overlap_param_gather = false;
                config.keep_gathered = false;
                config.reduce_in_16_bits = false;
            } else {
                config.hierarchical_reduce = false;
            }
        }
        config.precision = self.precision.unwrap_or(config.precision);
        let given = |to: &mut Option<usize>, from: Option<usize>| *to = from.or(*to);
        given(&mut config.hsdp, self.hsdp);
        given(&mut config.bucket_size, self.bucket_size);
        for (to, from) in [
            (&mut config.hierarchical_reduce, self.hierarchical_reduce),
            (&mut config.overlap_grad_reduce, self.overlap_grad_reduce),
            (&mut config.overlap_param_gather, self.overlap_param_gather),
            (&mut config.keep_gathered, self.keep_gathered),
            (&mut config.reduce_in_16_bits, self.reduce_in_16_bits),
            (&mut recipe.train.count_zeros, self.log_num_zeros_in_grad),
        ] {
            *to = from.unwrap_or(*to);
        }
        config.gradient_limit = self.gradient_limit.or(config.gradient_limit);
        recipe.train.loss_scale = self.loss_scale.or(recipe.train.loss_scale);
        given(
            &mut recipe.train.check_replicas_every,
            self.check_replicas_every,
        );
    }
}

/// Checks that each setting has an effect in the layout of a recipe. Errors in any layout are found by
/// `DataParallelConfig::check`.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let (config, parallel) = (&recipe.data_parallel, &recipe.parallel);
    if config.zero_stage > ZeroStage::Replicated && parallel.data_parallel_size() == 1 {
        return Err(format!(
            "zero_stage = {} shards over the data axis, and data = 1 has a single rank; set data \
             (--data-parallel) to 2 or more, or zero_stage to 0",
            config.zero_stage,
        )
        .into());
    }
    for (name, given) in [
        ("overlap_param_gather", config.overlap_param_gather),
        ("reduce_in_16_bits", config.reduce_in_16_bits),
    ] {
        if given && config.shard_ranks(parallel.data_parallel_size()) == 1 {
            return Err(format!(
                "{name} applies to communication within a sharding group, and with hsdp = 1 each group has a single \
                 rank; set hsdp to 2 or more, or remove {name}"
            )
            .into());
        }
    }
    if recipe.train.check_replicas_every.is_some() {
        // Whether a pipeline has any depends on the model: see `RankEstimates`.
        let one_stage = parallel.pipeline == 1 && parallel.tensor == 1;
        if one_stage && !has_data_replicas(recipe) {
            return Err(NO_REPLICAS.into());
        }
    }
    match not_fused_adamw(recipe).filter(|_| config.moments == Moments::Bf16) {
        Some(own) => Err(format!(
            "moments = \"bf16\" needs the fused AdamW, and {own}; change it, or remove moments"
        )
        .into()),
        None => Ok(()),
    }
}

/// The error for replica checks without replicas.
pub const NO_REPLICAS: &str =
    "check_replicas_every compares replicated weights, and this layout has none; remove it";

/// Whether ranks of the data axis always hold the same shard of a parameter.
pub fn has_data_replicas(recipe: &Recipe) -> bool {
    let data = recipe.parallel.data_parallel_size();
    recipe.data_parallel.shard_ranks(data) < data
}

#[cfg(test)]
#[path = "data_parallel_tests.rs"]
mod tests;
