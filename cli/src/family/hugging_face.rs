//! Conversion of a family from and to Hugging Face folders.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn_megatron::checkpoint::{Checkpoint, TensorSource};
use burn_megatron::nn::lora::{LoraConfig, LoraLayers};
use burn_megatron_models::hf::peft::{self, PeftAdapter};
use burn_megatron_models::hf::{
    self, ExportOptions, ExportSummary, HfConfig, HfFamily, HfFolder, model_type,
};

use super::{Families, Model, config_of};
use crate::companions::{Companions, Origin};
use crate::error::Error;

/// Converts the Hugging Face folders of a family. Every [`HfFamily`] implements it. `progress` receives the number of
/// tensor bytes since its last call.
pub trait HfExchange: Debug + Send + Sync {
    /// Opens a folder. Returns the model and its weights.
    fn open(&self, path: &Path) -> Result<(Model, Box<dyn TensorSource>), Error>;

    /// Returns the model of a folder's `config.json`, without its weights.
    fn config(&self, path: &Path) -> Result<Model, Error>;

    /// Checks that a `config.json` can describe a model of the family.
    fn check(&self, model: &Model) -> Result<(), Error>;

    /// Converts a folder to a checkpoint.
    fn import(
        &self,
        path: &Path,
        to: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Checkpoint, Error>;

    /// Converts a checkpoint with these weights to a folder. The folder contains the companions, or the files that
    /// the checkpoint stores from its conversion.
    fn export(
        &self,
        checkpoint: (&Checkpoint, &dyn TensorSource),
        companions: &Companions,
        to: &Path,
        options: ExportOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Exported, Error>;

    /// Checks that the adapters of a model can be written as a `peft` folder.
    fn check_adapter(&self, model: (&Model, &LoraLayers)) -> Result<(), Error>;

    /// Writes the adapters of a model as a `peft` folder.
    fn export_adapter(
        &self,
        adapters: &dyn TensorSource,
        model: (&Model, &LoraLayers),
        to: &Path,
        options: ExportOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<ExportSummary, Error>;

    /// Opens a `peft` folder with adapters of a model. Returns their settings and weights.
    fn open_adapter(
        &self,
        path: &Path,
        model: &Model,
    ) -> Result<(LoraConfig, Box<dyn TensorSource>), Error>;
}

/// Result of an export.
pub struct Exported {
    pub model_type: &'static str,
    pub summary: ExportSummary,
    /// Whether there are files in addition to the weights, such as a tokenizer.
    pub has_files: bool,
}

/// Prints the keys of a `config.json` that are read by neither `transformers` nor this program, once per folder.
fn warn_of_ignored_keys<F: HfFamily>(path: &Path, config: &HfConfig<F>) {
    static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    if config.ignored.is_empty() {
        return;
    }
    let is_first = match WARNED.lock() {
        Ok(mut warned) => warned.insert(path.to_path_buf()),
        Err(_) => true,
    };
    if is_first {
        let keys = config.ignored.join(", ");
        eprintln!(
            "{}: ignored keys of config.json that transformers does not read either: {keys}",
            path.display()
        );
    }
}

impl<F: HfFamily> HfExchange for F {
    fn open(&self, path: &Path) -> Result<(Model, Box<dyn TensorSource>), Error> {
        let folder = HfFolder::<F>::open_family(path)?;
        if let Some(part) = folder.left_out() {
            eprintln!("{}: {part}", path.display());
        }
        let config = folder.config().clone();
        warn_of_ignored_keys(path, &config);
        Ok((Model::of_hf(config.family, config.model), Box::new(folder)))
    }

    fn config(&self, path: &Path) -> Result<Model, Error> {
        let config = HfConfig::<F>::read(path)?;
        warn_of_ignored_keys(path, &config);
        Ok(Model::of_hf(config.family, config.model))
    }

    fn check(&self, model: &Model) -> Result<(), Error> {
        described::<F>(model).map(drop)
    }

    fn import(
        &self,
        path: &Path,
        to: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Checkpoint, Error> {
        let folder = HfFolder::<F>::open_family(path)?;
        Ok(hf::import(&folder, to, progress)?)
    }

    fn export(
        &self,
        (checkpoint, weights): (&Checkpoint, &dyn TensorSource),
        companions: &Companions,
        to: &Path,
        options: ExportOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Exported, Error> {
        let (mut config, mut files) = match companions.origin() {
            Some(Origin::Loaded(from)) => hf::export_config_of_run::<F>(checkpoint, from)?,
            Some(Origin::Like(folder)) => hf::export_config::<F>(checkpoint, Some(folder))?,
            None => hf::export_config::<F>(checkpoint, None)?,
        };
        companions.apply(&mut config.tokens, &mut files);
        let options = ExportOptions { files, ..options };
        Ok(Exported {
            summary: hf::export(weights, &config, to, &options, progress)?,
            model_type: config.family.name(),
            has_files: !options.files.is_empty(),
        })
    }

    fn check_adapter(&self, (model, layers): (&Model, &LoraLayers)) -> Result<(), Error> {
        let (family, model) = described::<F>(model)?;
        Ok(peft::check_export((family, &model), layers)?)
    }

    fn export_adapter(
        &self,
        adapters: &dyn TensorSource,
        (model, layers): (&Model, &LoraLayers),
        to: &Path,
        options: ExportOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<ExportSummary, Error> {
        let (family, model) = described::<F>(model)?;
        let of = (family, &model);
        Ok(peft::export_adapter(
            adapters, of, layers, to, &options, progress,
        )?)
    }

    fn open_adapter(
        &self,
        path: &Path,
        model: &Model,
    ) -> Result<(LoraConfig, Box<dyn TensorSource>), Error> {
        let (family, model) = described::<F>(model)?;
        let adapter = PeftAdapter::open(path, (family, &model))?;
        Ok((adapter.lora().clone(), Box::new(adapter)))
    }
}

/// Returns the Hugging Face family and the configuration of a model.
fn described<F: HfFamily>(model: &Model) -> Result<(F, F::Model), Error> {
    let config = config_of::<F::Model>(&**model);
    let config = config.ok_or_else(|| format!("{} is of another family", model.family()))?;
    let described = HfConfig::<F>::of(config)?;
    Ok((described.family, described.model))
}

impl Families {
    /// Returns the conversion for a Hugging Face folder, selected by its `model_type`.
    ///
    /// # Errors
    /// Returns an error if the `config.json` cannot be read, or if no family has the `model_type`.
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
