//! Converts Hugging Face folders to checkpoints. A checkpoint also stores the tokenizer and other files of the folder,
//! so that it can be exported again.

use std::collections::BTreeMap;
use std::path::Path;

use burn_megatron::checkpoint::{Checkpoint, CheckpointError, TensorShard, TensorSource};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{ConfigDifference, ModelConfig};
use serde_json::{Value, json};

use super::folder::CONFIG;
use super::shard::read_text;
use super::{HfConfig, HfError, HfFamily, HfFolder, ModelFamily, companion_files, is_hf_folder};
use crate::TransformerConfig;
use crate::weights::{CHUNK, FAMILY, Weights};

/// The prefix of the keys under which a checkpoint stores Hugging Face files.
const OBJECTS: &str = "hf/";

/// File names and contents.
type Files = Vec<(String, Vec<u8>)>;

/// Converts a Hugging Face folder to a checkpoint, which is saved as step 0 in the new checkpoint folder `to`.
/// `progress` receives the number of tensor bytes read since its last call. At most 64 MiB of tensor data is in memory
/// at a time.
///
/// The checkpoint also contains `config.json`, the tokenizer and the generation settings, so that it can be exported
/// again. The recipe in the checkpoint has only the section `model`.
///
/// # Errors
///
/// [`HfError`] if `to` already exists, or if reading or writing fails.
pub fn import<F: HfFamily>(
    folder: &HfFolder<F>,
    to: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<Checkpoint, HfError> {
    let config = folder.config();
    let mut shards = vec![];
    for part in config.family.tensors(&config.model) {
        if let Some(tensor) = folder.tensor(&part.key) {
            let slices = part.slices(tensor.dtype.size(), CHUNK).into_iter();
            shards.extend(slices.map(|slice| TensorShard {
                tensor: tensor.clone(),
                slice,
            }));
        }
    }
    let mut objects = companion_files(folder.path())?;
    let path = folder.path().join(CONFIG);
    objects.push((CONFIG.into(), read_text(&path)?));
    let mut settings = json!(config.model);
    settings[FAMILY] = config.family.name().into();
    let weights = Weights {
        source: folder,
        shards,
        objects: as_objects(objects),
        layout: "converted from Hugging Face",
        config: json!({ "model": settings }),
    };
    Ok(weights.save(to, progress)?)
}

/// Converts files to the objects that a checkpoint stores.
fn as_objects(files: Files) -> Files {
    let files = files.into_iter();
    let keyed = files.map(|(name, bytes)| (format!("{OBJECTS}{name}"), bytes));
    keyed.collect()
}

/// Returns the Hugging Face files of a checkpoint, as objects of a checkpoint with another model. The `config.json`
/// describes the new model. It is left out if no family can describe this model.
pub(crate) fn objects_for(
    checkpoint: &Checkpoint,
    family: Option<ModelFamily>,
    model: &TransformerConfig,
) -> Result<Files, HfError> {
    let (config, mut files) = kept(checkpoint)?;
    if let Some((bytes, family)) = config.zip(family) {
        let path = checkpoint.path().join(CONFIG);
        let config = HfConfig {
            family,
            model: model.clone(),
            ..HfConfig::parse_at(&path, &bytes)?
        };
        let text = config.to_json();
        let text = text.map_err(|source| HfError::Config { path, source })?;
        files.push((CONFIG.into(), text.into_bytes()));
    }
    Ok(as_objects(files))
}

/// Returns the model configuration of a checkpoint.
fn model_of<C: ModelConfig>(checkpoint: &Checkpoint) -> Result<C, CheckpointError> {
    let corrupt = |what: String| CheckpointError::corrupt(checkpoint.path(), what);
    let Some(Value::Object(settings)) = checkpoint.metadata().config.get("model") else {
        return Err(corrupt(
            "the recipe of the checkpoint has no [model]".into(),
        ));
    };
    let mut settings = settings.clone();
    settings.remove(FAMILY);
    let model: C = serde_json::from_value(settings.into()).map_err(|error| {
        corrupt(format!(
            "invalid [model] in the recipe of the checkpoint: {error}"
        ))
    })?;
    match model.check_layout(&ParallelConfig::new()) {
        Ok(()) => Ok(model),
        Err(error) => Err(corrupt(error.to_string())),
    }
}

/// Returns the `config.json` and the companion files that are needed to export a checkpoint. The family, the special
/// tokens and the files are taken from the Hugging Face folder `like`. By default, they are taken from the folder from
/// which the checkpoint was converted.
///
/// # Errors
///
/// [`HfError`] if the model differs from the model of `like`, or if no supported family can describe the model.
pub fn export_config<F: HfFamily>(
    checkpoint: &Checkpoint,
    like: Option<&Path>,
) -> Result<(HfConfig<F>, Files), HfError> {
    let model: F::Model = model_of(checkpoint)?;
    let path = like.unwrap_or(checkpoint.path()).join(CONFIG);
    let (config, files) = match like {
        Some(like) => (Some(read_text(&path)?), companion_files(like)?),
        None => kept(checkpoint)?,
    };
    let config = config.map(|bytes| HfConfig::<F>::parse_at(&path, &bytes));
    let Some(config) = config.transpose()? else {
        let config = HfConfig::of(&model).map_err(|source| HfError::Config { path, source })?;
        return Ok((config, files));
    };
    if let Some(difference) = model.differences(&config.model).first() {
        let ConfigDifference {
            setting,
            own,
            other,
        } = difference;
        let what = format!(
            "the model of {} has {setting} = {own}, but this one has {other}",
            checkpoint.path().display()
        );
        return Err(CheckpointError::corrupt(path, what).into());
    }
    Ok((HfConfig { model, ..config }, files))
}

/// Returns the `config.json` and the companion files that are needed to export a checkpoint of a run that started from
/// the weights in `origin`. `origin` is a Hugging Face folder, or a checkpoint that was converted from such a folder.
/// The special tokens and the files are taken from `origin`. The model settings are taken from the checkpoint, because
/// the run may have changed them.
///
/// # Errors
///
/// [`HfError`] if the files of `origin` cannot be read, or if no supported family can describe the model.
pub fn export_config_of_run<F: HfFamily>(
    checkpoint: &Checkpoint,
    origin: &Path,
) -> Result<(HfConfig<F>, Files), HfError> {
    let model: F::Model = model_of(checkpoint)?;
    let path = origin.join(CONFIG);
    let (config, files) = if is_hf_folder(origin) {
        (Some(read_text(&path)?), companion_files(origin)?)
    } else {
        kept(&Checkpoint::open(origin)?)?
    };
    let config = config.map(|bytes| HfConfig::<F>::parse_at(&path, &bytes));
    let config = match config.transpose()? {
        Some(config) if model.differences(&config.model).is_empty() => HfConfig { model, ..config },
        config => HfConfig {
            tokens: config.map(|config| config.tokens).unwrap_or_default(),
            ..HfConfig::of(&model).map_err(|source| HfError::Config { path, source })?
        },
    };
    Ok((config, files))
}

/// Returns the names and contents of the Hugging Face files that are stored in a checkpoint: `config.json`, the
/// tokenizer and the generation settings. The result is empty if the checkpoint was not converted from a Hugging Face
/// folder.
///
/// # Errors
///
/// [`CheckpointError`] if reading fails.
pub fn stored_hf_files(
    checkpoint: &Checkpoint,
) -> Result<BTreeMap<String, Vec<u8>>, CheckpointError> {
    let (config, files) = kept(checkpoint)?;
    let config = config.map(|bytes| (CONFIG.to_string(), bytes));
    Ok(files.into_iter().chain(config).collect())
}

/// Returns the `config.json` and the other Hugging Face files that a checkpoint stores.
fn kept(checkpoint: &Checkpoint) -> Result<(Option<Vec<u8>>, Files), CheckpointError> {
    let (mut config, mut files) = (None, vec![]);
    for key in checkpoint.objects() {
        let Some(name) = key.strip_prefix(OBJECTS) else {
            continue;
        };
        let bytes = checkpoint.object(&key)?;
        if name == CONFIG {
            config = Some(bytes)
        } else {
            files.push((name.to_string(), bytes))
        }
    }
    Ok((config, files))
}
