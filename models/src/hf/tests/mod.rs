//! Tests that read, write, modify and damage Hugging Face folders.

mod encodings;
mod own_family;
mod published;
mod reading;
mod refused;
mod writing;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_megatron::checkpoint::{TensorSlice, TensorSource};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::*;

const NAMES: [&str; 17] = [
    "deepseek-v2",
    "deepseek-v3",
    "deepseek-v3-mtp",
    "gpt-oss",
    "gemma2",
    "gemma3",
    "gpt2",
    "llama-longrope",
    "llama-yarn",
    "llama2",
    "llama3",
    "mistral",
    "mixtral",
    "olmoe",
    "qwen2",
    "qwen3",
    "qwen3-moe",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/hf")
        .join(name)
}

fn open(name: &str) -> HfFolder {
    HfFolder::open(fixture(name)).unwrap()
}

/// A temporary folder; removed on drop.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("burn-megatron-hf-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Returns a copy of a fixture.
    fn copy(name: &str) -> Self {
        let copy = Self::new();
        for entry in fs::read_dir(fixture(name)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.0.join(entry.file_name())).unwrap();
        }
        copy
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Modifies a JSON file.
    fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let path = self.path(name);
        let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut value);
        fs::write(&path, value.to_string()).unwrap();
    }

    fn refusal(&self) -> String {
        HfFolder::open(&self.0).unwrap_err().to_string()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The dtypes, shapes and bytes of tensors, keyed by name.
type Stored = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

/// Returns the dtypes, shapes and bytes of all tensors in the files of a folder, keyed by name.
fn stored(folder: &Path) -> Stored {
    let mut stored = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let bytes = fs::read(&path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
                let dtype = view.dtype().to_string();
                let value = (dtype, view.shape().to_vec(), view.data().to_vec());
                assert!(stored.insert(name.to_string(), value).is_none());
            }
        }
    }
    stored
}

fn whole(source: &dyn TensorSource, key: &str) -> Vec<u8> {
    let shape = source.tensor(key).unwrap().shape;
    source.read(key, &TensorSlice::whole(&shape)).unwrap()
}

/// Returns a fixture with modified tensors, in one file.
fn rewrite(name: &str, change: impl FnOnce(&mut Stored)) -> Temporary {
    let copy = Temporary::copy(name);
    let mut tensors = stored(&fixture(name));
    change(&mut tensors);
    write_tensors(&copy.path("model.safetensors"), tensors);
    copy
}

/// Writes a safetensors file.
fn write_tensors(path: &Path, tensors: Stored) {
    let (mut header, mut data) = (serde_json::Map::new(), vec![]);
    for (name, (dtype, shape, bytes)) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        header.insert(name, entry);
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    let file = [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        &data,
    ]
    .concat();
    fs::write(path, file).unwrap();
}

/// Returns the data of a slice of a tensor.
fn cut(all: &[u8], shape: &[usize], slice: &TensorSlice, size: usize) -> Vec<u8> {
    let runs = slice.runs(shape).into_iter();
    runs.flat_map(|run| all[run.in_tensor * size..(run.in_tensor + run.len) * size].to_vec())
        .collect()
}
