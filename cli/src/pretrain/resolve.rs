//! Applies the flags of `pretrain` to its recipe.

use std::path::Path;

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::comm::Launch;
use burn_megatron::kernel_selection::EpilogueFusion;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::regular_file::is_there;
use burn_megatron_models::hf::is_hf_folder;
use burn_megatron_models::hf::peft::is_peft_folder;
use toml::Table;

use super::args::PretrainArgs;
use crate::data::settings::DataConfig;
use crate::error::Error;
use crate::family::Families;
use crate::model_folder::base_of;
use crate::origins::Origin;
use crate::recipe::Recipe;
use crate::recipe::checkpoint::CheckpointConfig;
use crate::recipe::merge::{LayeredRecipe, RecipeLayers};
use crate::resume_mode::ResumeMode;
use crate::settings::Given;
use crate::settings::keys::{change, table_of};
use crate::{data, lora};

impl Recipe {
    /// Returns the recipe of a command line, with the source of each value.
    ///
    /// `default_recipe` is the TOML text of the recipe that `--recipe` overrides.
    ///
    /// # Errors
    /// Returns an error if files cannot be read, if flags do not apply, or if keys are set twice.
    pub fn resolve(
        args: &PretrainArgs,
        families: &Families,
        default_recipe: &str,
    ) -> Result<LayeredRecipe, Error> {
        let mode = ResumeMode::of(args)?;
        let first = mode.recipe(families)?;
        let own = first
            .as_ref()
            .filter(|_| mode.is_own(args.run_dir.as_deref()));
        let edit = |recipe: &mut Table| apply_to_tables(args, recipe);
        let layers = RecipeLayers {
            families,
            default_recipe,
            file: args.recipe.as_deref(),
            set: &args.set,
            resumed: mode.path().zip(first.as_ref()),
            saving: own.map(|first| &first.checkpoint),
            edit: Some(&edit),
            flags: Some(&args.settings),
        };
        let mut layered = layers.read()?;
        check_saving(&layered.recipe, own)?;
        let before = layered.recipe.clone();
        apply_to_recipe(args, &mut layered.recipe)?;
        layered.origins.record_flags(&before, &layered.recipe)?;
        if let Some((first, path)) = first.as_ref().zip(mode.path()) {
            keep_measured(&mut layered, first, path);
        }
        if first.is_none() {
            fill_in(&mut layered)?;
        }
        lora::set_base(&mut layered.recipe, &args.settings)?;
        Ok(layered)
    }
}

/// Keeps the measured choices of the run that is resumed, so that its results stay bit-identical.
fn keep_measured(layered: &mut LayeredRecipe, first: &Recipe, path: &Path) {
    let own = &mut layered.recipe.kernels.epilogue_fusion;
    let measured = first.kernels.epilogue_fusion;
    if *own == EpilogueFusion::Measured && measured != EpilogueFusion::Measured {
        *own = measured;
        let origin = Origin::Resumed(path.into());
        layered.origins.derive("kernels.epilogue_fusion", origin);
    }
}

/// Checks that a run that is resumed in its own folder still saves checkpoints if it did before.
fn check_saving(recipe: &Recipe, own: Option<&Recipe>) -> Result<(), Error> {
    match own {
        Some(first) if first.checkpoint.save && !recipe.checkpoint.save => Err(
            "--no-save would discard the result of a run that saves checkpoints; remove it, or resume into another \
             folder (--run-dir)"
                .into(),
        ),
        _ => Ok(()),
    }
}

/// Applies the flags that change several keys. The flags of single keys override them.
fn apply_to_tables(args: &PretrainArgs, recipe: &mut Table) -> Result<(), Error> {
    if args.saving.no_save {
        for (key, given) in args.settings.given() {
            let is_location = key == "checkpoint.load";
            let is_same = key == "checkpoint.save" && *given == Given::Value(false.into());
            if key.starts_with("checkpoint.") && !is_location && !is_same {
                return Err(format!("--no-save conflicts with --{key}: remove one of them").into());
            }
        }
        change(recipe, "checkpoint", CheckpointConfig::discard)?;
    }
    if let Some(path) = &args.data {
        let is_text = args.settings.has("data.json_key");
        change(recipe, "data", |data: &mut DataConfig| {
            data.read_from(path, is_text);
        })?;
    }
    Ok(())
}

/// Applies the flags whose value depends on other settings.
fn apply_to_recipe(args: &PretrainArgs, recipe: &mut Recipe) -> Result<(), Error> {
    if args.settings.is_data_auto() {
        let started = Launch::from_env()?.map(|launch| launch.world_size);
        recipe.parallel.data = Some(data_ranks(&recipe.parallel, started)?);
    }
    if let Some(micro_batches) = args.micro_batches {
        let (batch, ranks) = (
            recipe.train.global_batch_size,
            recipe.parallel.data_size().max(1),
        );
        recipe.train.micro_batch_size = micro_batch_size(batch, ranks, micro_batches)?;
    }
    check_choices(&args.kernels)?;
    for choices in &args.kernels {
        recipe.kernels.set(choices)?;
    }
    Ok(())
}

/// Checks that `--kernels` makes each choice only once.
fn check_choices(choices: &[String]) -> Result<(), Error> {
    let mut names = vec![];
    for choice in choices.iter().flat_map(|choices| choices.split(',')) {
        // A choice without a name applies to all operations.
        let name = choice.split_once('=').map_or("", |(name, _)| name.trim());
        if names.contains(&name) {
            return Err(match name {
                "" => "--kernels chooses for all operations twice: remove one choice".into(),
                name => format!("--kernels chooses {name} twice: remove one choice").into(),
            });
        }
        names.push(name);
    }
    Ok(())
}

/// Returns the size of the data axis if a launcher has `started` this number of ranks.
fn data_ranks(parallel: &ParallelConfig, started: Option<usize>) -> Result<usize, Error> {
    let Some(started) = started else {
        return Err(
            "--dp auto requires a launcher, which sets the number of ranks: start the run with a launcher, or set --dp \
             to a number"
                .into(),
        );
    };
    let replica = replica(parallel);
    if replica == 0 || !started.is_multiple_of(replica) {
        return Err(format!(
            "--dp auto: {started} ranks were started, which is not a multiple of {replica}, the ranks of tensor x \
             context x pipeline"
        )
        .into());
    }
    Ok(started / replica)
}

/// Returns the number of ranks per replica of the model.
pub fn replica(parallel: &ParallelConfig) -> usize {
    parallel.tensor * parallel.context * parallel.pipeline
}

/// Sets values that follow from the data and the weights, unless they were given.
fn fill_in(layered: &mut LayeredRecipe) -> Result<(), Error> {
    let LayeredRecipe {
        recipe, origins, ..
    } = layered;
    let data = &mut recipe.data;
    if data.tokenizer.is_none()
        && data.files.is_empty()
        && let Some(load) = &recipe.checkpoint.load
        && let Some(tokenizer) = tokenizer_of(load)?
    {
        data.tokenizer = Some(tokenizer);
        origins.derive("data.tokenizer", Origin::Weights(load.clone()));
    }
    let has_vocabulary = table_of(&recipe.model)?.contains_key("vocabulary");
    if has_vocabulary
        && origins.is_default("model.vocabulary")
        && let Some(vocabulary) = data::known_vocabulary(recipe)?
        && vocabulary != recipe.model.vocabulary()
    {
        let vocabulary = i64::try_from(vocabulary)?;
        let settings = Table::from_iter([("vocabulary".to_string(), vocabulary.into())]);
        recipe.model = recipe.model.with_settings(settings)?;
        origins.derive("model.vocabulary", Origin::Tokenizer);
    }
    let data = &recipe.data;
    let is_own = data.path.is_some() || !data.files.is_empty() || data.chat.is_some();
    if is_own && origins.is_default("sample.prompt") {
        recipe.sample.prompt.clear();
        origins.derive("sample.prompt", Origin::Data);
    }
    Ok(())
}

/// Returns the tokenizer of weights: the tokenizer in a Hugging Face folder, or the tokenizer that a checkpoint
/// names.
fn tokenizer_of(weights: &Path) -> Result<Option<String>, Error> {
    if is_there(&weights.join("tokenizer.json")) {
        return Ok(weights.to_str().map(String::from));
    }
    if is_peft_folder(weights) {
        return tokenizer_of(&base_of(weights)?);
    }
    if is_hf_folder(weights) {
        return Ok(None);
    }
    let checkpoint = Checkpoint::open(weights)?;
    let config = &checkpoint.metadata().config;
    Ok(config["data"]["tokenizer"].as_str().map(String::from))
}

/// Returns the micro-batch size for a number of micro-batches.
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
    fn the_data_axis_follows_from_the_ranks_that_were_started() {
        let parallel = ParallelConfig::new().with_tensor(2).with_pipeline(2);
        assert_eq!(data_ranks(&parallel, Some(12)).unwrap(), 3);
        let error = |started| data_ranks(&parallel, started).unwrap_err().to_string();
        assert!(error(Some(6)).contains("6 ranks were started, which is not a multiple of 4"));
        assert!(error(None).ends_with("or set --dp to a number"));
    }

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
