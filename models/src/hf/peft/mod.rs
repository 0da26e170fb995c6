//! Adapters in the format of `peft`: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! [`export_adapter`] writes the adapters of a checkpoint, [`PeftAdapter`] reads adapters, and [`MergedAdapters`]
//! merges them into the weights of their model.

mod config;
mod export;
mod merged;
mod source;

use burn::tensor::{DType, Device};
use burn_megatron::checkpoint::MODEL;
use burn_megatron::comm::ParallelContext;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::lora::{AdaptedLayer, LoraConfig, LoraLayers};
use burn_megatron::nn::{BuildError, ModelBuilder};

use super::{HfConfigError, HfFamily, WeightMapping};

pub use config::{adapted_model, is_peft_folder};
pub use export::{check_export, export_adapter};
pub use merged::{MergedAdapters, WithAdapters};
pub use source::PeftAdapter;

/// The file of the settings.
const CONFIG: &str = "adapter_config.json";
/// The file of the factors.
const WEIGHTS: &str = "adapter_model.safetensors";
/// The prefix of every tensor: the modules with which `peft` wraps a model.
const PREFIX: &str = "base_model.model.";

/// Returns the layers of a model that have adapters with these settings. Nothing is allocated.
///
/// # Errors
///
/// [`BuildError`] for invalid settings, and for a target that the model does not have.
pub fn adapted_layers<C: ModelConfig>(
    model: &C,
    lora: &LoraConfig,
) -> Result<LoraLayers, BuildError> {
    let (groups, device) = (ParallelContext::single(), Device::flex());
    let builder = ModelBuilder::with(&groups, &device, 0, DType::F32).with_lora(Some(lora))?;
    let outline = model.init_with(builder.outline())?;
    let layers = outline.lora.unwrap_or_else(|| LoraLayers {
        config: lora.clone(),
        layers: vec![],
    });
    layers.check_whole_model()?;
    Ok(layers)
}

/// Maps both factors of a layer to tensors of `peft`: `lora_A` `[rank, in]` and `lora_B` `[out, rank]`.
///
/// # Errors
///
/// [`HfConfigError::Sizes`] for a layer that is not a separate module in `transformers`, so that `peft` has no adapter
/// for it.
fn mappings<F: HfFamily>(
    family: F,
    tensors: &[WeightMapping],
    layer: &AdaptedLayer,
    rank: usize,
) -> Result<[WeightMapping; 2], HfConfigError> {
    let [input, output] = layer.size;
    let key = format!("{MODEL}{}", layer.weight);
    let is_module = |mapped: &&WeightMapping| {
        mapped.key == key
            && mapped.offset == layer.offset
            && mapped.transposed
            && mapped.shape == [output, input]
    };
    let module = tensors.iter().find(is_module);
    let module = module.and_then(|mapped| mapped.name.strip_suffix(".weight"));
    let Some(module) = module else {
        return Err(HfConfigError::Sizes(format!(
            "{}: the layer is not a separate linear module in the family {}, so peft has no adapter for it; merge it \
             into the weights",
            layer.adapter,
            family.name()
        )));
    };
    let factor = |own: &str, name: &str, shape: [usize; 2]| WeightMapping {
        transposed: true,
        ..WeightMapping::whole(
            &format!("{}.{own}", layer.adapter),
            &format!("{PREFIX}{module}.{name}.weight"),
            &shape,
        )
    };
    Ok([
        factor("a", "lora_A", [rank, input]),
        factor("b", "lora_B", [output, rank]),
    ])
}

/// Returns the mappings of all layers.
fn all_mappings<F: HfFamily>(
    family: F,
    model: &F::Model,
    layers: &LoraLayers,
) -> Result<Vec<WeightMapping>, HfConfigError> {
    let tensors = family.tensors(model);
    let rank = layers.config.rank;
    let layers = layers.layers.iter();
    let each = layers.map(|layer| mappings(family, &tensors, layer, rank));
    Ok(each.collect::<Result<Vec<_>, _>>()?.concat())
}
