//! Converts Hugging Face folders to checkpoints, and keeps their files for the way back.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointMetadata, Retention, TensorShard,
    TensorSource,
};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{ConfigDifference, ModelConfig};
use serde_json::{Map, Value, json};

use super::folder::CONFIG;
use super::mapping::CHUNK;
use super::shard::read_text;
use super::{HfConfig, HfError, HfFamily, HfFolder, companion_files};

/// The key of a model's family among its settings.
const FAMILY: &str = "family";

/// Prefix of a file name in the key of a checkpoint's object.
const OBJECTS: &str = "hf/";

/// File names and contents.
type Files = Vec<(String, Vec<u8>)>;

/// The deadline for publishing.
const DEADLINE: Duration = Duration::from_secs(60);

/// Saves the model of a folder as step 0 of a new folder of checkpoints. `progress` gets the number of tensor
/// bytes read since its last call; at most 64 MiB of tensors are in memory.
///
/// The checkpoint also has `config.json`, the tokenizer and the generation settings, for exporting it again.
/// Its recipe has only a `model`.
///
/// # Errors
///
/// [`HfError`] if `to` already exists, and for failed reads and writes.
pub fn import<F: HfFamily>(
    folder: &HfFolder<F>,
    to: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<Checkpoint, HfError> {
    check_free(to)?;
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
    let keyed = objects.into_iter();
    let objects: Vec<_> = keyed
        .map(|(name, bytes)| (format!("{OBJECTS}{name}"), bytes))
        .collect();
    let mut settings = json!(config.model);
    settings[FAMILY] = config.family.name().into();
    let metadata = CheckpointMetadata {
        step: 0,
        samples: 0,
        layout: "converted from Hugging Face".into(),
        config: json!({ "model": settings }),
        state: Value::Object(Map::new()),
    };
    let pending = CheckpointFolder::create(to)?.begin(0)?;
    pending.write_part(0, &shards, &objects, |index| {
        let TensorShard { tensor, slice } = &shards[index];
        let bytes = folder.read(&tensor.key, slice)?;
        progress(bytes.len() as u64);
        Ok(bytes)
    })?;
    Ok(pending.publish(1, &metadata, &Retention::default(), DEADLINE)?)
}

/// Checks that `to` is empty, except for leftovers of a killed save.
fn check_free(to: &Path) -> Result<(), CheckpointError> {
    let Ok(there) = std::fs::read_dir(to) else {
        return Ok(());
    };
    for entry in there {
        let entry = entry.map_err(|error| CheckpointError::io("read", to, error))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name != "lock" && !name.starts_with('.') {
            let there = format!("{name} already exists: give a new folder, or an empty one");
            let there = std::io::Error::new(std::io::ErrorKind::AlreadyExists, there);
            return Err(CheckpointError::io("write into", to, there));
        }
    }
    Ok(())
}

/// The model configuration of a checkpoint.
fn model_of<C: ModelConfig>(checkpoint: &Checkpoint) -> Result<C, CheckpointError> {
    let corrupt = |what: String| CheckpointError::corrupt(checkpoint.path(), what);
    let Some(Value::Object(settings)) = checkpoint.metadata().config.get("model") else {
        return Err(corrupt("its recipe has no model".into()));
    };
    let mut settings = settings.clone();
    settings.remove(FAMILY);
    let model: C = serde_json::from_value(settings.into())
        .map_err(|error| corrupt(format!("invalid model in its recipe: {error}")))?;
    match model.check_layout(&ParallelConfig::new()) {
        Ok(()) => Ok(model),
        Err(error) => Err(corrupt(error.to_string())),
    }
}

/// The `config.json` and the companion files with which to export a checkpoint. Family, special tokens and
/// files are taken from `like`, a Hugging Face folder, or by default from the folder that the checkpoint was
/// converted from.
///
/// # Errors
///
/// [`HfError`] if the model differs from that of `like`, or is of no supported family.
pub fn export_config<F: HfFamily>(
    checkpoint: &Checkpoint,
    like: Option<&Path>,
) -> Result<(HfConfig<F>, Files), HfError> {
    let model: F::Model = model_of(checkpoint)?;
    let path = checkpoint.path().join(CONFIG);
    let (config, files, path) = match like {
        Some(like) => {
            let path = like.join(CONFIG);
            (Some(read_config(&path)?), companion_files(like)?, path)
        }
        None => {
            let (config, files) = kept(checkpoint)?;
            let config = config
                .map(|bytes| HfConfig::parse(&bytes))
                .transpose()
                .map_err(|source| {
                    let path = path.clone();
                    HfError::Config { path, source }
                })?;
            (config, files, path)
        }
    };
    let Some(config) = config else {
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

fn read_config<F: HfFamily>(path: &Path) -> Result<HfConfig<F>, HfError> {
    HfConfig::parse(&read_text(path)?).map_err(|source| HfError::Config {
        path: path.to_path_buf(),
        source,
    })
}

/// The files of the Hugging Face folder that a checkpoint was converted from, by name: `config.json`, the
/// tokenizer and the generation settings; empty if it was not converted.
///
/// # Errors
///
/// [`CheckpointError`] for failed reads.
pub fn stored_hf_files(
    checkpoint: &Checkpoint,
) -> Result<BTreeMap<String, Vec<u8>>, CheckpointError> {
    let (config, files) = kept(checkpoint)?;
    let config = config.map(|bytes| (CONFIG.to_string(), bytes));
    Ok(files.into_iter().chain(config).collect())
}

/// The `config.json` and the other files in a checkpoint.
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
