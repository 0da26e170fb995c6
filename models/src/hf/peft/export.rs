//! Writes an adapter as a folder that `peft` can load.

use std::path::Path;

use burn_megatron::checkpoint::TensorSource;
use burn_megatron::nn::lora::{LoraLayers, LoraTarget};

use super::super::export::{ExportOptions, ExportSummary, PlannedTensor, plan, write_shard};
use super::super::staged_folder::StagedFolder;
use super::super::{HfConfigError, HfError, HfFamily};
use super::{CONFIG, WEIGHTS, all_mappings, config};
use crate::weights::check_tensor;

/// Checks that [`export_adapter`] can write the adapters: each adapted layer must be a separate module in
/// `transformers`.
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

/// Exports the LoRA adapters in `source` as a folder that `peft` can load. Other tensors of the source are not
/// exported. `progress` receives the number of tensor bytes written since its last call.
///
/// The files are first written to a temporary folder next to `to`, which is renamed to `to` when it is complete.
///
/// # Errors
///
/// [`HfError`] if `to` already exists, if a layer is not a separate module in `transformers`, if an adapter weight is
/// missing or has another shape, or if reading or writing fails.
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
