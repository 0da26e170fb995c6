//! The exchange of a family with Hugging Face.

use std::fmt::Debug;
use std::path::Path;

use burn_megatron::checkpoint::{Checkpoint, TensorSource};
use burn_megatron_models::hf::{HfFamily, HfFolder, model_type};

use super::{Families, Model};
use crate::convert::{self, ConvertArgs};
use crate::error::Error;

/// What commands do with the Hugging Face folders of a family: every [`HfFamily`].
pub trait HfExchange: Debug + Send + Sync {
    /// Opens a folder: the model and its weights.
    fn open(&self, path: &Path) -> Result<(Model, Box<dyn TensorSource>), Error>;

    /// Converts a folder to a checkpoint.
    fn import(&self, path: &Path, args: &ConvertArgs) -> Result<(), Error>;

    /// Converts a checkpoint to a folder.
    fn export(&self, checkpoint: &Checkpoint, args: &ConvertArgs) -> Result<(), Error>;
}

impl<F: HfFamily> HfExchange for F {
    fn open(&self, path: &Path) -> Result<(Model, Box<dyn TensorSource>), Error> {
        let folder = HfFolder::<F>::open_family(path)?;
        let config = folder.config().clone();
        Ok((Model::of_hf(config.family, config.model), Box::new(folder)))
    }

    fn import(&self, path: &Path, args: &ConvertArgs) -> Result<(), Error> {
        convert::import::<F>(path, args)
    }

    fn export(&self, checkpoint: &Checkpoint, args: &ConvertArgs) -> Result<(), Error> {
        convert::export::<F>(checkpoint, args)
    }
}

impl Families {
    /// The exchange for a Hugging Face folder, by its `model_type`.
    ///
    /// # Errors
    /// A `config.json` that cannot be read, and a `model_type` of no family.
    pub fn hf(&self, path: &Path) -> Result<&dyn HfExchange, Error> {
        let families = self.0.iter();
        let mut exchanges = families.filter_map(|family| Some((family.family(), family.hf()?)));
        let names: Vec<_> = exchanges.clone().map(|(name, _)| name).collect();
        let none = || {
            let path = path.display();
            Error::from(format!(
                "{path}: this command has no family of Hugging Face"
            ))
        };
        if names.is_empty() {
            return Err(none());
        }
        let name = model_type(path, &names)?;
        let found = exchanges.find(|(known, _)| *known == name);
        found.map(|(_, exchange)| exchange).ok_or_else(none)
    }
}
