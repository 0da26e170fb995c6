//! Adapters on disk: checkpoints of runs that trained adapters, and `peft` folders.

use std::path::Path;

use burn_megatron::checkpoint::{Checkpoint, TensorSource};
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron_models::hf::is_hf_folder;
use burn_megatron_models::hf::peft::{MergedAdapters, WithAdapters, adapted_model, is_peft_folder};

use super::{Families, Model};
use crate::error::Error;
use crate::model_folder::{lora_of, open_checkpoint};

/// Treatment of the adapter weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adapters {
    /// Merged into the weights of the model.
    Merged,
    /// Kept separate from the weights of the model, for further training.
    Separate,
}

/// Model and its weights.
type OpenedModel = (Model, Box<dyn TensorSource>);

/// Adapters together with their base model.
pub(super) struct SavedAdapters {
    model: Model,
    pub(super) lora: LoraConfig,
    base: Box<dyn TensorSource>,
    adapters: Box<dyn TensorSource>,
}

impl Families {
    /// Opens the adapters at a path with their base model. Returns `None` if the path has no adapters.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if the base model of the adapters is unknown.
    pub(super) fn open_adapters(
        &self,
        path: &Path,
        adapters: Adapters,
    ) -> Result<Option<OpenedModel>, Error> {
        let saved = if is_peft_folder(path) {
            self.of_peft(path)?
        } else if is_hf_folder(path) {
            return Ok(None);
        } else {
            let checkpoint = open_checkpoint(path)?;
            match lora_of(&checkpoint)? {
                Some(lora) => self.of_checkpoint(checkpoint, lora)?,
                None => return Ok(None),
            }
        };
        Ok(Some(saved.open(adapters)?))
    }

    pub(super) fn of_peft(&self, path: &Path) -> Result<SavedAdapters, Error> {
        let base = adapted_model(path)?;
        let (model, base) = self.base(path, base.as_deref())?;
        let Some(exchange) = model.hf() else {
            let (path, family) = (path.display(), model.family());
            return Err(
                format!("{path}: the family {family:?} is not a Hugging Face family").into(),
            );
        };
        let (lora, adapters) = exchange.open_adapter(path, &model)?;
        Ok(SavedAdapters {
            model,
            lora,
            base,
            adapters,
        })
    }

    fn of_checkpoint(
        &self,
        checkpoint: Checkpoint,
        lora: LoraConfig,
    ) -> Result<SavedAdapters, Error> {
        let model = self.model_of(&checkpoint)?;
        let (_, base) = self.base(checkpoint.path(), lora.base())?;
        Ok(SavedAdapters {
            model,
            lora,
            base,
            adapters: Box::new(checkpoint),
        })
    }

    /// Opens the base model of the adapters at `path`.
    fn base(&self, path: &Path, base: Option<&Path>) -> Result<OpenedModel, Error> {
        let path = path.display();
        let Some(base) = base else {
            return Err(format!(
                "{path} has adapters only and names no base model: a run that starts from random weights has no base \
                 model that could be read"
            )
            .into());
        };
        if !base.exists() {
            return Err(format!(
                "{path} has adapters of the model {}, which does not exist: expected a folder or a checkpoint at that \
                 path",
                base.display()
            )
            .into());
        }
        self.open(base)
    }
}

impl SavedAdapters {
    fn open(self, how: Adapters) -> Result<OpenedModel, Error> {
        let Self {
            model,
            lora,
            base,
            adapters,
        } = self;
        let source: Box<dyn TensorSource> = match how {
            Adapters::Separate => Box::new(WithAdapters { base, adapters }),
            Adapters::Merged => {
                let layers = model.adapted_layers(&lora)?;
                Box::new(MergedAdapters::new(base, adapters, layers)?)
            }
        };
        Ok((model, source))
    }
}
