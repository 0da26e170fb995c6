//! A recipe's model in the form that the planner requires: its checks, its operations, and its profile.
//!
//! This is the only source of a model's memory and time.

use burn_megatron::data_parallel::{Moments, Precision};
use burn_megatron::kernel_selection::{KernelChoice, Operation};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron_models::TransformerConfig;
use burn_megatron_plan::fit::StateBytes;
use burn_megatron_plan::hardware::Hardware;
use burn_megatron_plan::search::{FixedSettings, PlannedModel, SearchConfig};
use burn_megatron_plan::time::ComputeTypes;
use burn_megatron_plan::{Candidate, ModelProfile};

use crate::error::Error;
use crate::family::config_of;
use crate::fp8;
use crate::recipe::Recipe;
use crate::recipe::memory::OffloadTable;

/// Recipe whose layout is searched.
pub struct RecipeModel {
    recipe: Recipe,
    config: TransformerConfig,
}

impl RecipeModel {
    /// Creates the model of a recipe.
    ///
    /// # Errors
    ///
    /// Returns an error for a family whose layers the planner has no formulas for, for adapters, and for settings
    /// that no layout can run.
    pub fn new(recipe: Recipe) -> Result<Self, Error> {
        if recipe.lora.is_some() {
            return Err(
                "cannot plan [lora]: the planner counts every parameter as trained; remove the table to plan that"
                    .into(),
            );
        }
        let config = config_of::<TransformerConfig>(&*recipe.model).ok_or_else(|| {
            format!(
                "cannot plan a model of the family {:?}: expected a family of burn-megatron-models",
                recipe.model.family()
            )
        })?;
        config.check(1, false)?;
        recipe.train.check_without_layout(recipe.model.context())?;
        Ok(Self {
            config: config.clone(),
            recipe,
        })
    }

    /// Returns the recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Returns the compute types of the recipe.
    pub fn types(&self) -> ComputeTypes {
        let precision = self.recipe.data_parallel.precision;
        let bytes = f64::from(precision_bytes(precision) as u32);
        let is_fp8 = fp8::is_on(&self.recipe.fp8);
        ComputeTypes {
            products: if is_fp8 {
                "fp8".into()
            } else {
                precision.to_string()
            },
            attention: precision.to_string(),
            operand_bytes: if is_fp8 { 1.0 } else { bytes },
            parameter_bytes: if self.recipe.data_parallel.fp8_param_gather {
                1.0
            } else {
                bytes
            },
        }
    }

    /// Returns the configuration for a search over all layouts.
    pub fn search_config<'a>(&self, devices: usize, hardware: &'a Hardware) -> SearchConfig<'a> {
        SearchConfig {
            devices,
            hardware,
            types: self.types(),
            sequence: self.recipe.sequence_length(),
            global_batch: self.recipe.train.global_batch_size,
            memory_limit: hardware.memory,
            sharing: self.recipe.data_parallel.clone(),
            fixed: FixedSettings {
                offload: self.given_offload(),
                given: self.recipe.parallel.clone(),
                ..FixedSettings::default()
            },
            top: usize::MAX,
        }
    }

    /// Returns the fraction of the optimizer state on the host, if the search must not choose it: the recipe offloads
    /// state, or other settings exclude the offload.
    fn given_offload(&self) -> Option<f64> {
        let share = self.recipe.memory.offload.optimizer;
        let unfused = self.recipe.kernels.of(Operation::Optimizer) == KernelChoice::Unfused;
        let excluded = unfused || self.recipe.data_parallel.fp8_param_gather;
        (share > 0.0 || excluded).then_some(share)
    }

    /// Returns the recipe with the settings of a candidate.
    pub fn with(&self, candidate: &Candidate) -> Recipe {
        let mut recipe = self.recipe.clone();
        recipe.data_parallel = candidate.sharing(&recipe.data_parallel);
        recipe.parallel = candidate.layout.clone();
        recipe.train.micro_batch_size = candidate.micro_batch;
        let recompute = candidate.recompute.settings();
        recipe.memory.offload = OffloadTable {
            optimizer: candidate.offload,
            activations: recompute.offload.bytes,
            prefetch: recompute.offload.prefetch,
        };
        recipe.memory.recompute = recompute;
        recipe
    }
}

impl PlannedModel for RecipeModel {
    fn layers(&self) -> usize {
        self.recipe.model.layers()
    }

    fn has_experts(&self) -> bool {
        self.config.moe.is_some()
    }

    fn flops_per_token(&self) -> f64 {
        self.config.flops_per_token(self.recipe.sequence_length())
    }

    fn check(&self, layout: &ParallelConfig) -> Result<(), String> {
        let model = &self.recipe.model;
        let text = |error: &dyn std::fmt::Display| error.to_string();
        model.check_layout(layout).map_err(|error| text(&error))?;
        model.check_context(layout).map_err(|error| text(&error))?;
        let sequence = self.recipe.check_sequence(layout);
        sequence.map_err(|error| text(&error))
    }

    fn profile(&self, layout: &ParallelConfig, micro_batch: usize) -> Result<ModelProfile, String> {
        let profile = self
            .config
            .profile(layout, micro_batch, self.recipe.sequence_length());
        let precision = self.recipe.data_parallel.precision;
        Ok(profile.with_element_bytes(precision_bytes(precision)))
    }

    fn state_bytes(&self) -> StateBytes {
        let parallel = &self.recipe.data_parallel;
        let moments = match parallel.moments {
            Moments::F32 => 8,
            Moments::Bf16 => 4,
        };
        let own = precision_bytes(parallel.precision);
        // A model in 16 bits has master weights.
        let master = if own < 4 { 4 } else { 0 };
        StateBytes {
            parameter: own,
            gradient: own.max(4),
            optimizer: master + moments,
        }
    }
}

fn precision_bytes(precision: Precision) -> u64 {
    match precision {
        Precision::F64 => 8,
        Precision::F32 => 4,
        Precision::Bf16 | Precision::F16 => 2,
    }
}
