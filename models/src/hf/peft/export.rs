//! Writes an adapter as a folder that `peft` can load.

use std::path::Path;

use burn_megatron::checkpoint::TensorSource;
use burn_megatron::nn::lora::{LoraLayers, LoraTarget};

use super::super::export::{ExportOptions, ExportSummary, PlannedTensor, plan, write_shard};
use super::super::staged_folder::StagedFolder;
use super::super::{HfConfigError, HfError, HfFamily};
use super::{CONFIG, WEIGHTS, all_mappings, config};
use crate::weights::check_tensor;

/// Checks that each layer is a separate module in `transformers`, so that [`export_adapter`] can write its adapter.
///
/// # Errors
///
/// [`HfConfigError::Sizes`] for the first layer that is not a separate module.
pub fn check_export<F: HfFamily>(
    (family, model): (F, &F::Model),
    layers: &LoraLayers,
) -> Result<(), HfConfigError> {
    all_mappings(family, model, layers).map(drop)
}

/// Writes the adapters of `source` as a folder that `peft` can load. Other tensors of the source are left out.
/// `progress` receives the number of tensor bytes written since its last call.
///
/// The folder is staged next to `to`, and renamed when it is complete.
///
/// # Errors
///
/// [`HfError`] if `to` already exists, for a layer that is not a separate module in `transformers`, for factors that
/// are missing or have another shape, and for failed reads and writes.
pub fn export_adapter<F: HfFamily>(
    source: &dyn TensorSource,
    (family, model): (F, &F::Model),
    layers: &LoraLayers,
    to: &Path,
    options: &ExportOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<ExportSummary, HfError> {
    StagedFolder::check_free(to)?;
    let mapped = all_mappings(family, model, layers).map_err(|source| HfError::Config {
        path: to.join(CONFIG),
        source,
    })?;
    for factor in &mapped {
        let wanted: Vec<_> = factor.shape.iter().rev().copied().collect();
        check_tensor(source, &factor.key, |shape| shape == wanted, &wanted)?;
    }
    let has = |target: &LoraTarget| layers.layers.iter().any(|layer| layer.target == *target);
    let targets: Vec<_> = LoraTarget::ALL.into_iter().filter(has).collect();
    let base = layers.config.base();
    let text = config::write(&layers.config, &targets, base);
    let tensors = plan(source, mapped, options);
    let staged = StagedFolder::new(to)?;
    staged.write(CONFIG, text.as_bytes())?;
    write_shard(&staged, WEIGHTS, &tensors, source, progress)?;
    staged.publish()?;
    Ok(ExportSummary {
        tensors: tensors.len(),
        bytes: tensors.iter().map(PlannedTensor::bytes).sum(),
        files: 1,
    })
}
