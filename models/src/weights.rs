//! Saves the weights of a model as a checkpoint without training state.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use burn_megatron::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointMetadata, MODEL, Retention,
    TensorShard, TensorSource,
};
use serde_json::{Map, Value};

/// The maximum number of bytes that are read at once when tensors are copied.
pub(crate) const CHUNK: usize = 64 << 20;

/// The key of the model family in the settings of a model.
pub(crate) const FAMILY: &str = "family";

/// The timeout for publishing a checkpoint.
const DEADLINE: Duration = Duration::from_secs(60);

/// The tensors of a checkpoint that contains only weights.
pub(crate) struct Weights<'a> {
    pub source: &'a dyn TensorSource,
    /// The slices of the tensors in `source`, in the order in which they are written.
    pub shards: Vec<TensorShard>,
    pub objects: Vec<(String, Vec<u8>)>,
    /// The text that is stored in the checkpoint instead of a parallel layout.
    pub layout: &'a str,
    /// The recipe that is stored in the checkpoint.
    pub config: Value,
}

impl Weights<'_> {
    /// Saves the weights as step 0 in the new checkpoint folder `to`. `progress` receives the number of tensor bytes
    /// read since its last call. Only one shard is in memory at a time.
    pub fn save(
        self,
        to: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Checkpoint, CheckpointError> {
        check_free(to)?;
        let metadata = CheckpointMetadata {
            step: 0,
            samples: 0,
            layout: self.layout.into(),
            config: self.config,
            state: Value::Object(Map::new()),
        };
        let pending = CheckpointFolder::create(to)?.begin(0)?;
        pending.write_part(0, &self.shards, &self.objects, |index| {
            let TensorShard { tensor, slice } = &self.shards[index];
            let bytes = self.source.read(&tensor.key, slice)?;
            progress(bytes.len() as u64);
            Ok(bytes)
        })?;
        pending.publish(1, &metadata, &Retention::default(), DEADLINE)
    }
}

/// Checks that `to` does not exist or is empty, except for the remaining files of a save that was killed.
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

/// Checks that a source contains a tensor whose shape `fits` accepts. The error shows the shape `wanted`.
pub(crate) fn check_tensor(
    source: &dyn TensorSource,
    key: &str,
    fits: impl Fn(&[usize]) -> bool,
    wanted: &[usize],
) -> Result<(), CheckpointError> {
    let of = source.name();
    match source.tensor(key) {
        None => Err(CheckpointError::missing(of, key)),
        Some(found) if !fits(&found.shape) => Err(CheckpointError::Shape {
            of,
            key: key.into(),
            found: found.shape,
            wanted: wanted.to_vec(),
        }),
        Some(_) => Ok(()),
    }
}

/// Checks that the weights of a source have these keys and shapes.
pub(crate) fn check(
    source: &dyn TensorSource,
    shapes: &BTreeMap<String, Vec<usize>>,
) -> Result<(), CheckpointError> {
    let of = source.name();
    let mut missing = vec![];
    for (key, wanted) in shapes {
        match check_tensor(source, key, |shape| shape == wanted, wanted) {
            Err(CheckpointError::Missing { keys, .. }) => missing.extend(keys),
            checked => checked?,
        }
    }
    if !missing.is_empty() {
        return Err(CheckpointError::Missing { of, keys: missing });
    }
    let keys = source.keys().into_iter();
    let keys: Vec<_> = keys
        .filter(|key| key.starts_with(MODEL) && !shapes.contains_key(key))
        .collect();
    if keys.is_empty() {
        Ok(())
    } else {
        Err(CheckpointError::Unexpected { of, keys })
    }
}
