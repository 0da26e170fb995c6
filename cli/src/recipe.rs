//! The recipe: all settings that decide what a run computes.

use std::path::Path;

use burn_megatron::bounded;
use burn_megatron::choice::KernelChoices;
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron::train::{GenerateConfig, TrainConfig};
use burn_megatron_models::TransformerConfig;
use serde::{Deserialize, Serialize};
use toml::Table;

use crate::data::settings::DataConfig;
use crate::error::Error;
use crate::retired;
use crate::saving::CheckpointConfig;

/// The recipe that runs without flags.
pub const DEFAULT_RECIPE: &str = include_str!("../../examples/recipes/tiny.toml");

/// The tables of a recipe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// The model.
    pub model: TransformerConfig,
    /// The parallel layout.
    pub parallel: Parallel,
    /// What is sharded over the data axis, and the type that the model computes in.
    pub data_parallel: DataParallelConfig,
    /// Which operations use fused kernels.
    pub kernels: KernelChoices,
    /// Which layers multiply in 8 bits, and with which scaling recipe.
    pub fp8: Fp8Config,
    /// The training run, without its [`DataParallelConfig`]: see [`Recipe::train_config`].
    pub train: TrainConfig,
    /// The text that is generated at its end.
    pub sample: GenerateConfig,
    /// The training data.
    pub data: DataConfig,
    /// When checkpoints are saved.
    pub checkpoint: CheckpointConfig,
}

/// The parallel layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parallel {
    /// Tensor-parallel ranks.
    pub tensor: usize,
    /// Data-parallel ranks.
    pub data: usize,
    /// Whether activations between the blocks are split along the sequence.
    pub sequence_parallel: bool,
    /// Pipeline-parallel ranks.
    pub pipeline: usize,
    /// The pipeline schedule: a kind, or a CSV file; `1f1b` by default.
    pub schedule: Option<String>,
    /// Stages per pipeline rank; by default the usual number for the schedule.
    pub virtual_stages: Option<usize>,
    /// How the layers are split over the stages.
    pub split: LayerSplit,
    /// The most weight gradients of the output layer that the last stage defers to its cool-down; 0 defers all.
    pub defer_embedding_wgrad: Option<usize>,
}

impl Default for Parallel {
    fn default() -> Self {
        Self {
            tensor: 1,
            data: 1,
            sequence_parallel: false,
            pipeline: 1,
            schedule: None,
            virtual_stages: None,
            split: LayerSplit::Even,
            defer_embedding_wgrad: None,
        }
    }
}

/// The largest recipe that is read, in bytes.
const MAX_RECIPE_BYTES: u64 = 1 << 20;

fn read_text(path: &Path) -> Result<String, Error> {
    bounded::read_text(path, MAX_RECIPE_BYTES)
        .map_err(|error| format!("cannot read the recipe {}: {error}", path.display()).into())
}

fn invalid(path: &Path, error: &dyn std::fmt::Display) -> Error {
    format!("invalid recipe {}: {error}", path.display()).into()
}

impl Recipe {
    /// Reads a recipe; unknown and retired keys are errors.
    pub fn read(path: &Path) -> Result<Self, Error> {
        Self::parse(&read_text(path)?).map_err(|error| invalid(path, &*error))
    }

    /// Reads the recipe of a run folder, which an earlier version may have written: retired keys are translated.
    pub fn read_of_run(path: &Path) -> Result<Self, Error> {
        let text = read_text(path)?;
        if let Ok(mut table) = text.parse::<Table>()
            && retired::translate_recipe(&mut table)
        {
            return table.try_into().map_err(|error| invalid(path, &error));
        }
        Self::parse(&text).map_err(|error| invalid(path, &*error))
    }

    /// Parses a recipe in TOML.
    ///
    /// # Errors
    /// Unknown keys, retired keys with their successors, and values of the wrong type.
    pub fn parse(text: &str) -> Result<Self, Error> {
        if let Ok(table) = text.parse::<Table>() {
            retired::check_recipe(&table)?;
        }
        Ok(toml::from_str(text)?)
    }

    /// The training run with its [`DataParallelConfig`].
    pub fn train_config(&self) -> TrainConfig {
        TrainConfig {
            data_parallel: self.data_parallel.clone(),
            ..self.train.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_shipped_recipes_are_valid() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/recipes");
        let mut recipes = 0;
        for file in fs::read_dir(folder).unwrap() {
            let recipe = Recipe::read(&file.unwrap().path()).unwrap();
            recipe.plan().unwrap();
            assert_eq!(
                toml::from_str::<Recipe>(&toml::to_string(&recipe).unwrap()).unwrap(),
                recipe
            );
            recipes += 1;
        }
        assert!(recipes >= 2);
    }

    #[test]
    fn a_misspelt_key_is_named() {
        let error = toml::from_str::<Recipe>("[train]\nstep = 3")
            .unwrap_err()
            .to_string();
        assert!(error.contains("unknown field `step`"), "{error}");
        assert!(error.contains("`steps`"), "{error}");
    }
}
