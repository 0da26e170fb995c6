//! Saves an upcycled model as a checkpoint.

use std::path::Path;

use burn_megatron::checkpoint::{Checkpoint, TensorMeta, TensorShard, TensorSlice, TensorSource};
use serde_json::{Map, Value, json};

use super::Upcycled;
use crate::TransformerConfig;
use crate::hf::{HfConfig, HfError, HfFamily, ModelFamily, objects_for};
use crate::weights::{CHUNK, FAMILY, Weights};

/// Saves `upcycled`, which was converted from the checkpoint `from`. It is saved as step 0 in the new checkpoint folder
/// `to`, without optimizer state. `progress` receives the number of tensor bytes written since its last call. Tensors
/// are copied in slices of at most 64 MiB, or one row if a row is larger.
///
/// The recipe in the new checkpoint is the recipe of `from` with the settings of the new model. The Hugging Face family
/// in the recipe is set to a family that can describe the new model. If there is no such family, the name of the family
/// is kept, and the model cannot be exported.
///
/// # Errors
///
/// [`HfError`] if `to` already exists, or if reading or writing fails.
pub fn save(
    upcycled: &Upcycled<'_>,
    from: &Checkpoint,
    to: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<Checkpoint, HfError> {
    let model = upcycled.model();
    let family = HfConfig::<ModelFamily>::of(model).map(|config| config.family);
    let family = family.ok();
    let tensors = upcycled.keys().into_iter();
    let tensors = tensors.filter_map(|key| upcycled.tensor(&key));
    let weights = Weights {
        source: upcycled,
        shards: tensors.flat_map(shards).collect(),
        objects: objects_for(from, family, model)?,
        layout: "upcycled",
        config: recipe(from, family, model),
    };
    Ok(weights.save(to, progress)?)
}

/// Returns the recipe of a checkpoint, with a different model.
fn recipe(from: &Checkpoint, family: Option<ModelFamily>, model: &TransformerConfig) -> Value {
    let mut recipe = match &from.metadata().config {
        Value::Object(recipe) => recipe.clone(),
        _ => Map::new(),
    };
    let old = recipe.remove("model").unwrap_or_default();
    let name = family.map(|family| family.name().into());
    let mut settings = json!(model);
    if let Some(name) = name.or_else(|| old.get(FAMILY).cloned()) {
        settings[FAMILY] = name;
    }
    recipe.insert("model".into(), settings);
    recipe.into()
}

/// Divides a tensor into slices of complete rows. Each slice has at most [`CHUNK`] bytes, unless a single row is
/// larger.
fn shards(tensor: TensorMeta) -> Vec<TensorShard> {
    let row = tensor.shape.last().copied().unwrap_or(1);
    let step = (CHUNK / (row * tensor.dtype.size())).max(1) * row;
    let len: usize = tensor.shape.iter().product();
    let ranges = (0..len)
        .step_by(step)
        .map(|start| start..len.min(start + step));
    let slices = ranges.flat_map(|range| TensorSlice::from_flat_range(&tensor.shape, range));
    let shard = |slice| TensorShard {
        tensor: tensor.clone(),
        slice,
    };
    slices.map(shard).collect()
}
