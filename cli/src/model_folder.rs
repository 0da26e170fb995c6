//! Models on disk, of any family: checkpoints, Hugging Face folders and `peft` folders.

use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron_models::hf::is_hf_folder;
use burn_megatron_models::hf::peft::{adapted_model, is_peft_folder};
use serde_json::Value;

use crate::error::Error;

/// Opens a checkpoint, or the latest checkpoint of a folder of checkpoints or of a run folder.
///
/// # Errors
/// Returns an error if the folder is missing or a file cannot be read. The message for a missing folder names the
/// expected folders.
pub fn open_checkpoint(path: &Path) -> Result<Checkpoint, Error> {
    if !path.is_dir() {
        return Err(format!(
            "there is no model folder at {}: expected a checkpoint, a run folder, or a Hugging Face folder, which \
             `hf download OWNER/NAME --local-dir DIR` makes",
            path.display()
        )
        .into());
    }
    Ok(Checkpoint::open(path)?)
}

/// Returns the settings of the adapters in a checkpoint, if it has adapters.
///
/// # Errors
/// Returns an error if the settings are invalid.
pub fn lora_of(checkpoint: &Checkpoint) -> Result<Option<LoraConfig>, Error> {
    let lora = match checkpoint.metadata().config.get("lora") {
        None | Some(Value::Null) => return Ok(None),
        Some(lora) => lora.clone(),
    };
    let lora = serde_json::from_value(lora).map_err(|error| {
        let path = checkpoint.path().display();
        format!("{path}: invalid [lora] in the recipe of the checkpoint: {error}")
    })?;
    Ok(Some(lora))
}

/// Returns the base model of a run that starts from `path` and trains adapters: `path` itself, unless it has
/// adapters.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub fn base_of(path: &Path) -> Result<PathBuf, Error> {
    let base = if is_peft_folder(path) {
        adapted_model(path)?
    } else if is_hf_folder(path) {
        None
    } else {
        lora_of(&open_checkpoint(path)?)?.and_then(|lora| Some(lora.base()?.to_path_buf()))
    };
    Ok(base.unwrap_or_else(|| path.to_path_buf()))
}
