//! The data of a recipe.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn_megatron::data::{Dataset, Sampling, TextData};

use crate::recipe::{Error, Recipe};

/// Opens the data of the recipe, checked for what the run needs of it.
pub fn open(recipe: &Recipe) -> Result<Arc<dyn Dataset>, Error> {
    let data: Arc<dyn Dataset> = Arc::new(TextData::open(&text_path(recipe))?);
    if recipe.model.vocabulary != data.vocabulary() {
        return Err(format!(
            "model.vocabulary = {} does not fit byte-level text, which has {} tokens",
            recipe.model.vocabulary,
            data.vocabulary(),
        )
        .into());
    }
    let train = &recipe.train;
    let seq = train.sequence_length.unwrap_or(recipe.model.context);
    data.training(&Sampling {
        seq,
        seed: train.seed,
        samples: (train.steps * train.global_batch_size) as u64,
    })?;
    data.held_out(seq, train.held_out_samples)?;
    Ok(data)
}

/// The text of the recipe, or of this repository.
fn text_path(recipe: &Recipe) -> PathBuf {
    let repository = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = recipe.data.path.clone().unwrap_or_else(repository);
    path.canonicalize().unwrap_or(path)
}
