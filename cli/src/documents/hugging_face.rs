//! Layouts of Hugging Face dataset folders: a repository of the hub, and `datasets.save_to_disk`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::regular_file;
use burn_megatron::regular_file::is_there;
use burn_megatron_data::DataError;
use serde::Deserialize;

use super::TEXT;
use super::error::InputError;
use super::extension::extension;

/// The maximum size of a JSON file that is read, in bytes.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// The split that is read.
const TRAIN: &str = "train";

/// The prefix of file names that `datasets.save_to_disk` writes.
const SAVED: &str = "data";

/// Words in file names that select a split. `datasets` uses the same words.
const SPLIT_WORDS: [(&str, &[&str]); 3] = [
    (TRAIN, &[TRAIN, "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// The file that `datasets.save_to_disk` writes next to the files of a split.
#[derive(Deserialize)]
struct State {
    #[serde(rename = "_data_files")]
    files: Vec<StateFile>,
}

#[derive(Deserialize)]
struct StateFile {
    filename: PathBuf,
}

/// The file that `datasets.save_to_disk` writes next to the folders of several splits.
#[derive(Deserialize)]
struct DatasetDict {
    splits: Vec<String>,
}

/// Returns the files of the split `train` of a dataset folder, or of its only split. `all` contains the files of the
/// folder. Returns `None` if the folder is not a dataset folder.
///
/// # Errors
/// Returns [`InputError::Splits`] if there are several splits and none is named `train`. Returns [`InputError::Io`]
/// if a file cannot be read.
pub fn data_files(folder: &Path, all: &[PathBuf]) -> Result<Option<Vec<PathBuf>>, InputError> {
    if let Some(dict) = json::<DatasetDict>(&folder.join("dataset_dict.json"))? {
        let split = chosen(folder, dict.splits.into_iter().map(Some).collect())?;
        return match split {
            Some(split) => saved_files(&inside(folder, Path::new(&split))),
            None => Ok(Some(vec![])),
        };
    }
    if let Some(files) = saved_files(folder)? {
        return Ok(Some(files));
    }
    let mut files = tables(&folder.join("data"))?;
    if files.is_empty() {
        files = tables(folder)?;
    }
    let is_text = |path: &PathBuf| extension(path).is_some_and(|end| TEXT.contains(&&*end));
    if files.is_empty() && !all.iter().any(|path| is_text(path) && !is_readme(path)) {
        // Datasets with several configurations have a folder for each configuration.
        files = all.iter().filter(|path| is_table(path)).cloned().collect();
    }
    if files.is_empty() {
        return Ok(None);
    }
    let split = chosen(folder, files.iter().map(|file| split_of(file)).collect())?;
    files.retain(|file| split_of(file) == split);
    Ok(Some(files))
}

/// Returns whether a file is a README.
pub fn is_readme(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem == "README")
}

fn is_table(path: &Path) -> bool {
    extension(path).is_some_and(|end| end == "parquet" || end == "arrow")
}

/// Returns the split in the name of a file, as in `data/train-00000-of-00002.parquet`.
pub fn split_of(path: &Path) -> Option<String> {
    let stem = path.file_stem()?.to_str()?;
    let mut ends = stem.match_indices("-of-").map(|(at, _)| &stem[..at]);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let sharded = ends.find_map(|before| {
        let (split, shard) = before.rsplit_once('-')?;
        (is_number(shard) && !split.is_empty()).then_some(split)
    });
    if let Some(split) = sharded {
        // In a cache, the name starts with the name of the dataset.
        let split = split.rsplit('-').next();
        return split.filter(|split| *split != SAVED).map(String::from);
    }
    let words: Vec<_> = stem
        .split(|letter: char| "-._ ".contains(letter) || letter.is_ascii_digit())
        .collect();
    let known = SPLIT_WORDS
        .iter()
        .find(|(_, names)| words.iter().any(|word| names.contains(word)));
    known.map(|(split, _)| (*split).into())
}

/// Selects the split to read from the splits of a folder's files. Files without a split count as training data.
fn chosen(folder: &Path, splits: BTreeSet<Option<String>>) -> Result<Option<String>, InputError> {
    let train = Some(TRAIN.to_string());
    if splits.contains(&train) {
        return Ok(train);
    }
    if splits.contains(&None) {
        return Ok(None);
    }
    if splits.len() > 1 {
        let names: Vec<_> = splits.into_iter().flatten().collect();
        return Err(InputError::Splits {
            path: folder.to_path_buf(),
            splits: names.join(", "),
        });
    }
    Ok(splits.into_iter().flatten().next())
}

/// Returns the files that `datasets.save_to_disk` wrote to a folder, in order.
fn saved_files(folder: &Path) -> Result<Option<Vec<PathBuf>>, InputError> {
    let state = json::<State>(&folder.join("state.json"))?;
    let files = state.map(|state| state.files.into_iter());
    Ok(files.map(|files| files.map(|file| inside(folder, &file.filename)).collect()))
}

/// Returns the path of a name in a folder. The path cannot lead out of the folder.
fn inside(folder: &Path, name: &Path) -> PathBuf {
    folder.join(name.file_name().unwrap_or_default())
}

/// Returns the Parquet and Arrow files directly in a folder, in the order of their names. Returns no files if the
/// folder does not exist.
fn tables(folder: &Path) -> Result<Vec<PathBuf>, InputError> {
    if !folder.is_dir() {
        return Ok(vec![]);
    }
    let unreadable = |source| DataError::Unreadable {
        path: folder.to_path_buf(),
        source,
    };
    let mut files = vec![];
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        // Downloaded files are links to the files of a cache.
        if is_table(&entry.path()) && !hidden && entry.path().is_file() {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

/// Reads a JSON file, if it exists and has this form.
fn json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Option<T>, InputError> {
    if !is_there(path) {
        return Ok(None);
    }
    let bytes = regular_file::read(path, MAX_JSON_BYTES);
    let bytes = bytes.map_err(|source| InputError::io("read", path, source))?;
    Ok(serde_json::from_slice(&bytes).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_name_their_split() {
        for (name, split) in [
            ("train-00000-of-00002.parquet", Some("train")),
            ("train_sft-00000-of-00003-a1b2.parquet", Some("train_sft")),
            ("wikitext-train-00000-of-00003.arrow", Some("train")),
            ("wikitext-validation.arrow", Some("validation")),
            ("dev.parquet", Some("validation")),
            ("held_out-0-of-1.parquet", Some("held_out")),
            ("data-00000-of-00002.arrow", None),
            ("forum-of-trains.parquet", None),
            ("0000.parquet", None),
        ] {
            assert_eq!(split_of(Path::new(name)).as_deref(), split, "{name}");
        }
    }
}
