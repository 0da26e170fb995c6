//! What the ranks of the data axis share, and in which type the model computes: the flags, and what
//! must fit the layout.

use burn_megatron::choice::{Choice, Operation};
use burn_megatron::data_parallel::{Moments, Precision, ZeroStage};
use burn_megatron::optim::LossScale;
use clap::Args;
use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;
use serde::{Deserialize, Deserializer};

use crate::recipe::{Error, Recipe};

/// Flags of data parallelism; each one takes the place of a key of `[data_parallel]`, the last three
/// of keys of `[train]`.
#[derive(Args, Debug, Default)]
pub struct SharingArgs {
    /// What the ranks of --data-parallel share: 0 nothing, 1 the optimizer state, 2 the gradients
    /// too, 3 the parameters as well.
    #[arg(long, value_name = "0|1|2|3")]
    pub zero_stage: Option<ZeroStage>,
    /// Ranks that share one sharded copy, where they are not all of --data-parallel.
    #[arg(long, value_name = "N")]
    pub hsdp: Option<usize>,
    /// The type that the model computes in; weights are stepped in f32 whatever it is.
    #[arg(long, value_name = "f32|bf16|f16", value_parser = precision)]
    pub precision: Option<Precision>,
    /// Sum each bucket of gradients over the ranks as soon as it is final, while backward goes on;
    /// it is so by default.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub overlap_grad_reduce: Option<bool>,
    /// Gather the parameters that were stepped while the next forward begins; for --zero-stage 1
    /// and 2.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub overlap_param_gather: Option<bool>,
    /// Elements at which a bucket of gradients is full.
    #[arg(long, value_name = "ELEMENTS")]
    pub bucket_size: Option<usize>,
    /// Keep parameters that were gathered for a forward until its backward; for --zero-stage 3.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub keep_gathered: Option<bool>,
    /// Send gradients in the 16 bits of --precision; they are added up in f32 all the same.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub reduce_in_16_bits: Option<bool>,
    /// The norm above which a bucket of a rank's gradients counts as not finite.
    #[arg(long, value_name = "NORM")]
    pub gradient_limit: Option<f64>,
    /// What the loss is multiplied with for backward: none, dynamic or a number. By default dynamic
    /// for f16, none for other types.
    #[arg(long, value_name = "none|dynamic|NUMBER", value_parser = loss_scale)]
    pub loss_scale: Option<LossScale>,
    /// Steps between two comparisons of the weights of ranks that hold the same.
    #[arg(long, value_name = "N")]
    pub check_replicas_every: Option<usize>,
    /// Count the elements of the gradient that are zero, in each step.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub count_zeros: Option<bool>,
}

/// A type to compute in, as a flag has it.
pub fn precision(text: &str) -> Result<Precision, ValueError> {
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

impl SharingArgs {
    /// Puts what was given into a recipe.
    pub fn apply(&self, recipe: &mut Recipe) {
        let config = &mut recipe.data_parallel;
        if let Some(stage) = self.zero_stage {
            config.zero_stage = stage;
            if stage == ZeroStage::Replicated {
                // What the recipe says of its shards has no meaning any more.
                config.hsdp = None;
                config.overlap_param_gather = false;
                config.keep_gathered = false;
                config.reduce_in_16_bits = false;
            }
        }
        config.precision = self.precision.unwrap_or(config.precision);
        let given = |to: &mut Option<usize>, from: Option<usize>| *to = from.or(*to);
        given(&mut config.hsdp, self.hsdp);
        given(&mut config.bucket_size, self.bucket_size);
        for (to, from) in [
            (&mut config.overlap_grad_reduce, self.overlap_grad_reduce),
            (&mut config.overlap_param_gather, self.overlap_param_gather),
            (&mut config.keep_gathered, self.keep_gathered),
            (&mut config.reduce_in_16_bits, self.reduce_in_16_bits),
            (&mut recipe.train.count_zeros, self.count_zeros),
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

/// Finds the first setting that would do nothing in the layout of a recipe. What does not fit
/// whatever the layout is found by `DataParallelConfig::check`.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let (config, parallel) = (&recipe.data_parallel, &recipe.parallel);
    if config.zero_stage > ZeroStage::Replicated && parallel.data == 1 {
        return Err(format!(
            "zero_stage = {} shards over the ranks of the data axis, and data = 1 leaves everything \
             on one; set data (--data-parallel) to 2 or more, or zero_stage to 0",
            config.zero_stage,
        )
        .into());
    }
    for (name, given) in [
        ("overlap_param_gather", config.overlap_param_gather),
        ("reduce_in_16_bits", config.reduce_in_16_bits),
    ] {
        if given && config.shard_ranks(parallel.data) == 1 {
            return Err(format!(
                "{name} is about what the ranks of a sharded copy send each other, and hsdp = 1 \
                 gives each rank a copy of its own; set hsdp to 2 or more, or leave {name} out"
            )
            .into());
        }
    }
    if recipe.train.check_replicas_every.is_some() && !has_replicas(recipe) {
        return Err(
            "check_replicas_every compares ranks that hold the same, and in this layout no two do; \
             leave it out"
                .into(),
        );
    }
    let optimizer = recipe.kernels.of(Operation::Optimizer);
    match (config.moments, optimizer) {
        (Moments::Bf16, Choice::Unfused) => Err("moments = \"bf16\" is what the fused AdamW can \
             keep, and kernels.optimizer is unfused; fuse it, or leave moments out"
            .into()),
        _ => Ok(()),
    }
}

/// Whether two ranks hold the same part of a parameter all the time.
fn has_replicas(recipe: &Recipe) -> bool {
    let (config, parallel) = (&recipe.data_parallel, &recipe.parallel);
    let over_data = config.shard_ranks(parallel.data) < parallel.data;
    let at_both_ends = parallel.pipeline > 1 && recipe.model.tied;
    // On the tensor axis norms are replicated.
    over_data || parallel.tensor > 1 || at_both_ends
}

#[cfg(test)]
#[path = "sharing_tests.rs"]
mod tests;
