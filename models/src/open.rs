//! Opens models on disk, in any supported format.

use std::path::Path;

use burn_megatron::checkpoint::{Checkpoint, TensorSource};

use crate::TransformerConfig;
use crate::hf::{HfError, HfFolder, is_hf_folder, model_of};

/// A model on disk: its tensors and its configuration.
pub struct ModelSource {
    /// Its tensors.
    pub source: Box<dyn TensorSource>,
    /// Its configuration.
    pub model: TransformerConfig,
}

impl ModelSource {
    /// Opens a Hugging Face folder, a checkpoint, or the latest checkpoint of a folder of checkpoints or of a
    /// run.
    ///
    /// # Errors
    ///
    /// See [`HfFolder::open`], [`Checkpoint::open`] and [`model_of`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, HfError> {
        let path = path.as_ref();
        if is_hf_folder(path) {
            let folder = HfFolder::open(path)?;
            let model = folder.config().model.clone();
            let source = Box::new(folder);
            return Ok(Self { source, model });
        }
        let checkpoint = Checkpoint::open(path)?;
        let model = model_of(&checkpoint)?;
        let source = Box::new(checkpoint);
        Ok(Self { source, model })
    }
}
