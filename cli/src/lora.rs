//! Checks and uses the table `[lora]` of a recipe.

use std::path::Path;

use burn_megatron::nn::lora::LoraConfig;

use crate::error::Error;
use crate::model_folder::base_of;
use crate::recipe::Recipe;
use crate::settings::SettingFlags;

/// The key for the base model of the adapters.
pub const BASE: &str = "base_model";

/// Returns the header line for adapters without a base model.
pub fn note_of_base(lora: &LoraConfig) -> Option<&'static str> {
    lora.base_model.is_none().then_some(
        "the frozen weights are random, from the seed: --load or lora.base_model starts from the weights of a model",
    )
}

/// Checks the adapters of a recipe: their settings, that the model has each layer, and settings that conflict with
/// adapters.
///
/// # Errors
/// Returns an error that names the invalid setting, and the valid values or the remedy.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let Some(lora) = &recipe.lora else {
        return Ok(());
    };
    recipe.model.adapted_layers(lora)?;
    if recipe.parallel.defer_embedding_wgrad.is_some() {
        return Err(
            "parallel.defer_embedding_wgrad conflicts with [lora], in which the output layer has no gradient; remove \
             one of them"
                .into(),
        );
    }
    if recipe.data_parallel.fp8_param_gather {
        return Err(
            "data_parallel.fp8_param_gather conflicts with [lora], in which no trained weights are in FP8; remove \
             one of them"
                .into(),
        );
    }
    Ok(())
}

/// Returns the path of the weights to load. A run without a checkpoint starts from `load`, or else from the base
/// model of its adapters. A run with a checkpoint loads only the base model of its adapters, because checkpoints of
/// adapters have no frozen weights.
pub fn initial_weights(recipe: &Recipe, has_checkpoint: bool) -> Option<&Path> {
    let load = recipe.checkpoint.load.as_deref();
    let lora = recipe.lora.as_ref();
    let base = lora.and_then(|lora| lora.base_model.as_deref());
    match (has_checkpoint, lora) {
        (true, None) => None,
        (true, Some(_)) => base.or(load),
        (false, _) => load.or(base),
    }
}

/// Records the base model in a recipe with adapters: the model of the flag `--load`, or else of the recipe's own
/// `load`. The run can then be resumed, and its adapters can be merged.
///
/// # Errors
/// Returns an error if the path cannot be read, or if `--lora.base_model` names another model.
pub fn set_base(recipe: &mut Recipe, flags: &SettingFlags) -> Result<(), Error> {
    let flag = flags.text("checkpoint.load").map(Path::new);
    let of_recipe = recipe.checkpoint.load.as_deref();
    if let Some(lora) = &mut recipe.lora
        && let Some(path) = flag.or(of_recipe.filter(|_| lora.base_model.is_none()))
    {
        let base = base_of(path)?;
        // The run may be resumed from another working directory.
        let base = base.canonicalize().unwrap_or(base);
        let given = flags.text("lora.base_model").map(Path::new);
        if let Some(given) = given
            && given.canonicalize().ok().as_ref() != Some(&base)
        {
            return Err(format!(
                "--lora.base_model {} conflicts with --load {}, whose base model is {}: remove one of them",
                given.display(),
                path.display(),
                base.display()
            )
            .into());
        }
        lora.base_model = Some(base);
    }
    Ok(())
}
