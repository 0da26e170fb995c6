//! Applies the flags of `pretrain` to the recipe that they name.

use std::path::Path;

use burn_megatron::mesh::{ContextExchange, ContextSplit};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron::train::schedule::LrStyle;

use super::args::PretrainArgs;
use crate::error::Error;
use crate::family::Families;
use crate::lora;
use crate::recipe::Recipe;
use crate::resume_mode::ResumeMode;

impl Recipe {
    /// The recipe of a command line.
    ///
    /// `default_recipe` is the TOML text of the recipe without `--recipe`.
    pub fn resolve(
        args: &PretrainArgs,
        families: &Families,
        default_recipe: &str,
    ) -> Result<Self, Error> {
        let mode = ResumeMode::of(args)?;
        let first = mode.recipe(families)?;
        let inherits = args.recipe.is_none() && first.is_some();
        // The model of a recipe may be that of the weights that it loads.
        let load = args.saving.load.clone();
        let load = load.or_else(|| first.as_ref()?.checkpoint.load.clone());
        let mut recipe = match (&args.recipe, &first) {
            (Some(path), _) => Self::read_with(path, families, load.as_deref())?,
            (None, Some(first)) => first.clone(),
            (None, None) => Self::parse(default_recipe, families)?,
        };
        if let Some(first) = first.filter(|_| mode.is_own(args.run_dir.as_deref())) {
            if args.saving.no_save && first.checkpoint.save {
                return Err(
                    "--no-save would discard the result of a run that saves checkpoints; remove it, or resume into another \
                     folder (--run-dir)"
                        .into(),
                );
            }
            recipe.checkpoint = recipe.checkpoint.continue_from(&first.checkpoint);
        }
        let set = |to: &mut usize, from: Option<usize>| *to = from.unwrap_or(*to);
        set(&mut recipe.parallel.tensor, args.tensor_parallel);
        recipe.parallel.data = args.data_parallel.or(recipe.parallel.data);
        if let Some(context) = args.context_parallel {
            recipe.parallel.context = context;
            if context == 1 {
                // The context settings of the recipe no longer apply.
                recipe.parallel.context_split = ContextSplit::default();
                recipe.parallel.context_exchange = None;
                recipe.parallel.context_inner = None;
                recipe.parallel.context_narrow_gradients = false;
            }
        }
        if let Some(exchange) = &args.context_exchange {
            recipe.parallel.context_exchange = Some(exchange.parse()?);
            if recipe.parallel.context_exchange != Some(ContextExchange::Hierarchical) {
                recipe.parallel.context_inner = None;
            }
        }
        set(&mut recipe.parallel.expert, args.expert_parallel);
        if args.expert_tensor_parallel.is_some() {
            recipe.parallel.expert_tensor = args.expert_tensor_parallel;
        }
        if let Some(pipeline) = args.pipeline_parallel {
            recipe.parallel.pipeline = pipeline;
            if pipeline == 1 {
                // The pipeline settings of the recipe no longer apply.
                recipe.parallel.schedule = None;
                recipe.parallel.virtual_stages = None;
                recipe.parallel.split = LayerSplit::Even;
                recipe.parallel.defer_embedding_wgrad = None;
            }
        }
        if let Some(schedule) = &args.pipeline_schedule {
            recipe.parallel.schedule = Some(schedule.parse()?);
            recipe.parallel.virtual_stages = None;
        }
        if args.defer_embedding_wgrad.is_some() {
            recipe.parallel.defer_embedding_wgrad = args.defer_embedding_wgrad;
        }
        if args.virtual_stages.is_some() {
            recipe.parallel.virtual_stages = args.virtual_stages;
        }
        set(&mut recipe.train.micro_batch_size, args.micro_batch_size);
        set(&mut recipe.train.global_batch_size, args.global_batch_size);
        if let Some(micro_batches) = args.micro_batches {
            let (batch, ranks) = (
                recipe.train.global_batch_size,
                recipe.parallel.data_size().max(1),
            );
            recipe.train.micro_batch_size = micro_batch_size(batch, ranks, micro_batches)?;
        }
        if let Some(steps) = args.steps {
            // Warm-up and decay are scaled with the number of steps, except for a run that is resumed with its own
            // recipe.
            let train = &mut recipe.train;
            let before = train.steps.max(1);
            let scaled = |part: usize| {
                if inherits {
                    return part;
                }
                usize::try_from(part as u128 * steps as u128 / before as u128).unwrap_or(usize::MAX)
            };
            train.warmup_steps = scaled(train.warmup_steps);
            if let LrStyle::Wsd { decay_steps, .. } = &mut train.schedule {
                *decay_steps = scaled(*decay_steps);
            }
            train.steps = steps;
        }
        if let Some(peak) = args.lr {
            let train = &mut recipe.train;
            train.min_learning_rate *= peak / train.learning_rate;
            train.learning_rate = peak;
        }
        recipe.parallel.sequence_parallel = args
            .sequence_parallel
            .unwrap_or(recipe.parallel.sequence_parallel);
        recipe.train.seed = args.seed.unwrap_or(recipe.train.seed);
        for choices in &args.kernels {
            recipe.kernels.set(choices)?;
        }
        recipe.kernels.loss_chunk_size = args.loss_chunk_size.or(recipe.kernels.loss_chunk_size);
        args.sharing.apply(&mut recipe);
        args.fp8.apply(&mut recipe.fp8, &mut recipe.data_parallel);
        args.memory.apply(&mut recipe.memory);
        args.saving.apply(&mut recipe.checkpoint);
        args.data.apply(&mut recipe.data);
        let data = &mut recipe.data;
        if data.tokenizer.is_none() && data.files.is_empty() {
            // The tokenizer of the weights.
            let folder = recipe.checkpoint.load.as_deref().and_then(Path::to_str);
            let has_one = |folder: &&str| Path::new(folder).join("tokenizer.json").is_file();
            data.tokenizer = folder.filter(has_one).map(String::from);
        }
        lora::set_base(&mut recipe, args.saving.load.as_deref())?;
        Ok(recipe)
    }
}

/// The size of a micro-batch, given their number.
fn micro_batch_size(batch: usize, ranks: usize, micro_batches: usize) -> Result<usize, Error> {
    let Some(multiple) = ranks.checked_mul(micro_batches).filter(|n| *n > 0) else {
        return Err(format!(
            "invalid --micro-batches {micro_batches}: expected 1 to {}, the samples per rank",
            (batch / ranks).max(1)
        )
        .into());
    };
    let share = batch / ranks;
    if share == 0 || !share.is_multiple_of(micro_batches) {
        return Err(format!(
            "{share} samples per rank cannot be split into {micro_batches} micro-batches; set \
             --global-batch-size to a multiple of {multiple}"
        )
        .into());
    }
    Ok(share / micro_batches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_that_cannot_be_are_refused_with_what_can() {
        let error = |batch, ranks, count| match micro_batch_size(batch, ranks, count) {
            Ok(size) => panic!("{size}"),
            Err(error) => error.to_string(),
        };
        assert_eq!(micro_batch_size(16, 2, 4).unwrap(), 2);
        let none = "invalid --micro-batches 0: expected 1 to 8, the samples per rank";
        assert_eq!(error(16, 2, 0), none);
        assert!(error(16, 2, usize::MAX).contains("expected 1 to 8"));
        let share = "8 samples per rank cannot be split into 3 micro-batches; set \
                     --global-batch-size to a multiple of 6";
        assert_eq!(error(16, 2, 3), share);
        assert!(error(1, 2, 4).ends_with("a multiple of 8"));
    }
}
