//! Folders of Hugging Face as checkpoints, and what of them a checkpoint keeps.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use burn_megatron::checkpoint::{
    About, Checkpoint, CheckpointError, CheckpointFolder, Piece, Retention, TensorSource,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::folder::CONFIG;
use super::names::{CHUNK, mapped};
use super::shard::read_text;
use super::{HfConfig, HfError, HfFolder, companions};
use crate::{Difference, TransformerConfig};

/// Before the name of a file, in the key of an object of a checkpoint.
const OBJECTS: &str = "hf/";

/// Names and contents.
type Files = Vec<(String, Vec<u8>)>;

/// How long the own part may take to be seen.
const DEADLINE: Duration = Duration::from_secs(60);

/// Saves the model of a folder as step 0 of a new folder of checkpoints. `progress` gets the bytes of
/// tensors as they are read; at most 64 MiB of them are in memory.
///
/// The checkpoint keeps `config.json`, the tokenizer and the generation settings, for the way back; the
/// recipe in it has a `model` and nothing else.
///
/// # Errors
///
/// [`HfError`] where `to` is there already, and what cannot be read or written.
pub fn import(
    folder: &HfFolder,
    to: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<Checkpoint, HfError> {
    check_free(to)?;
    let config = folder.config();
    let mut pieces = vec![];
    for part in mapped(config.family, &config.model) {
        if let Some(tensor) = folder.tensor(&part.key) {
            let boxes = part.boxes(tensor.dtype.size(), CHUNK).into_iter();
            pieces.extend(boxes.map(|slice| Piece {
                tensor: tensor.clone(),
                slice,
            }));
        }
    }
    let mut objects = companions(folder.path())?;
    let path = folder.path().join(CONFIG);
    objects.push((CONFIG.into(), read_text(&path)?));
    let keyed = objects.into_iter();
    let objects: Vec<_> = keyed
        .map(|(name, bytes)| (format!("{OBJECTS}{name}"), bytes))
        .collect();
    let about = About {
        step: 0,
        samples: 0,
        layout: "converted from Hugging Face".into(),
        config: json!({ "model": config.model }),
        state: Value::Object(Map::new()),
    };
    let draft = CheckpointFolder::create(to)?.begin(0)?;
    draft.write_part(0, &pieces, &objects, |index| {
        let Piece { tensor, slice } = &pieces[index];
        let bytes = folder.read(&tensor.key, slice)?;
        progress(bytes.len() as u64);
        Ok(bytes)
    })?;
    Ok(draft.publish(1, &about, &Retention::default(), DEADLINE)?)
}

/// Checks that nothing is at `to` but what a killed save left behind.
fn check_free(to: &Path) -> Result<(), CheckpointError> {
    let Ok(there) = std::fs::read_dir(to) else {
        return Ok(());
    };
    for entry in there {
        let entry = entry.map_err(|error| CheckpointError::io("read", to, error))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name != "lock" && !name.starts_with('.') {
            let there = format!("{name} is there already: give a new folder, or an empty one");
            let there = std::io::Error::new(std::io::ErrorKind::AlreadyExists, there);
            return Err(CheckpointError::io("write into", to, there));
        }
    }
    Ok(())
}

/// The model of a checkpoint.
///
/// # Errors
///
/// [`CheckpointError::Corrupt`] where its recipe has no `model` that is understood.
pub fn model_of(checkpoint: &Checkpoint) -> Result<TransformerConfig, CheckpointError> {
    let corrupt = |what: String| CheckpointError::corrupt(checkpoint.path(), what);
    let Some(model) = checkpoint.about().config.get("model") else {
        return Err(corrupt("its recipe has no model".into()));
    };
    let model = TransformerConfig::deserialize(model)
        .map_err(|error| corrupt(format!("the model of its recipe: {error}")))?;
    match model.check(1, false) {
        Ok(_) => Ok(model),
        Err(error) => Err(corrupt(error.to_string())),
    }
}

/// What a checkpoint is exported with: the configuration of its model, and more files. Family, special
/// tokens and files are those of `like`, a folder of Hugging Face; where there is none, those that the
/// checkpoint was converted from.
///
/// # Errors
///
/// [`HfError`] where the model is not that of `like`, or of no family.
pub fn exported_as(
    checkpoint: &Checkpoint,
    like: Option<&Path>,
) -> Result<(HfConfig, Files), HfError> {
    let model = model_of(checkpoint)?;
    let path = checkpoint.path().join(CONFIG);
    let (config, files, path) = match like {
        Some(like) => {
            let path = like.join(CONFIG);
            (Some(read_config(&path)?), companions(like)?, path)
        }
        None => {
            let (config, files) = kept(checkpoint)?;
            let config = config.map(|bytes| HfConfig::parse(&bytes)).transpose();
            let config = config.map_err(|source| {
                let path = path.clone();
                HfError::Config { path, source }
            })?;
            (config, files, path)
        }
    };
    let Some(config) = config else {
        let config = HfConfig::of(&model);
        let config = config.map_err(|source| HfError::Config { path, source })?;
        return Ok((config, files));
    };
    if let Some(difference) = model.differences(&config.model).first() {
        let Difference {
            setting,
            own,
            other,
        } = difference;
        let what = format!(
            "the model of {} has {setting} = {own}, and this one {other}",
            checkpoint.path().display()
        );
        return Err(CheckpointError::corrupt(path, what).into());
    }
    Ok((HfConfig { model, ..config }, files))
}

fn read_config(path: &Path) -> Result<HfConfig, HfError> {
    HfConfig::parse(&read_text(path)?).map_err(|source| HfError::Config {
        path: path.to_path_buf(),
        source,
    })
}

/// The files of the folder that a checkpoint was converted from, by name: `config.json`, the tokenizer
/// and the generation settings; none where it was not converted.
///
/// # Errors
///
/// [`CheckpointError`] for one that cannot be read.
pub fn kept_files(checkpoint: &Checkpoint) -> Result<BTreeMap<String, Vec<u8>>, CheckpointError> {
    let (config, files) = kept(checkpoint)?;
    let config = config.map(|bytes| (CONFIG.to_string(), bytes));
    Ok(files.into_iter().chain(config).collect())
}

/// The `config.json` and the other files that a checkpoint keeps.
fn kept(checkpoint: &Checkpoint) -> Result<(Option<Vec<u8>>, Files), CheckpointError> {
    let (mut config, mut files) = (None, vec![]);
    for key in checkpoint.objects() {
        let Some(name) = key.strip_prefix(OBJECTS) else {
            continue;
        };
        let bytes = checkpoint.object(&key)?;
        match name == CONFIG {
            true => config = Some(bytes),
            false => files.push((name.to_string(), bytes)),
        }
    }
    Ok((config, files))
}
