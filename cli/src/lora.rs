//! The table `[lora]` of a recipe.

use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron_models::hf::is_hf_folder;

use crate::error::Error;
use crate::family::{base_of, lora_of};
use crate::recipe::Recipe;

/// Checks the adapters of a recipe: their settings, that the model has each layer, and settings that they exclude.
///
/// # Errors
/// What is invalid, and what would fit.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let Some(lora) = &recipe.lora else {
        return Ok(());
    };
    recipe.model.adapted_layers(lora)?;
    if recipe.parallel.defer_embedding_wgrad.is_some() {
        return Err(
            "parallel.defer_embedding_wgrad defers the gradient of the output layer, which has none beside [lora]; \
             remove one of them"
                .into(),
        );
    }
    if recipe.data_parallel.fp8_param_gather {
        return Err(
            "data_parallel.fp8_param_gather gathers the weights that are trained in 8 bits, and beside [lora] none of \
             them is; remove one of them"
                .into(),
        );
    }
    Ok(())
}

/// Records in a recipe with adapters which model `--load` names, so that the run can be resumed and its adapters merged.
///
/// # Errors
/// A path that cannot be read.
pub fn set_base(recipe: &mut Recipe, load: Option<&Path>) -> Result<(), Error> {
    if let (Some(lora), Some(path)) = (&mut recipe.lora, load) {
        let base = base_of(path)?;
        // The run may be resumed from another folder.
        lora.base_model = Some(base.canonicalize().unwrap_or(base));
    }
    Ok(())
}

/// The folder of Hugging Face from which files such as a tokenizer are taken for adapters of a checkpoint, if their model is
/// one.
///
/// # Errors
/// Settings of adapters that are invalid.
pub fn like(checkpoint: &Checkpoint) -> Result<Option<PathBuf>, Error> {
    let base = lora_of(checkpoint)?.and_then(|lora| lora.base_model);
    Ok(base.filter(|base| is_hf_folder(base)))
}
