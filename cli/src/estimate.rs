//! Estimates the memory of the ranks of a run before anything is allocated.

use burn::tensor::{DType, Device};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::host_memory::{HostMemory, MemoryLimit, RequiredMemory};
use burn_megatron::data_parallel::{ShardingEstimate, freeze};
use burn_megatron::device::DeviceKind;
use burn_megatron::kernel_selection::{KernelSelection, Operation};
use burn_megatron::mesh::{Axis, Mesh};
use burn_megatron::nn::{LogitsShape, ModelBuilder};

use crate::data_parallel::{NO_REPLICAS, has_data_replicas};
use crate::error::Error;
use crate::family::Outline;
use crate::parallel_plan::ParallelPlan;
use crate::ranks::RankSetup;
use crate::recipe::Recipe;

/// Estimates of all ranks. Ranks with the same pipeline coordinate have the same estimate.
pub struct RankEstimates {
    /// The estimates, indexed by pipeline coordinate.
    ranks: Vec<RankEstimate>,
    /// The number of parameters of the whole model, each counted once.
    pub parameters: usize,
    /// The number of trained parameters.
    pub trained: usize,
}

/// Estimate of a rank.
pub struct RankEstimate {
    pub sharing: ShardingEstimate,
    /// The number of elements in the parameter shards of the rank.
    pub parameters: usize,
    pub kernels: KernelSelection,
    pub flops_per_token: f64,
    need: RequiredMemory,
}

/// Returns the builder of a rank's part of the model.
pub fn builder(
    recipe: &Recipe,
    groups: &ParallelContext,
    device: &Device,
) -> Result<ModelBuilder, Error> {
    // Parameters are created in f32. They stay in f32 as master weights if the model computes in 16 bits.
    let precision = recipe.data_parallel.precision;
    let builder = ModelBuilder::with(groups, device, recipe.train.seed, precision.master())
        .with_compute_dtype(precision.of(precision.master()))
        .with_kernels(&recipe.kernels)?;
    let builder = builder.with_fp8(&recipe.fp8)?;
    Ok(builder.with_lora(recipe.lora.as_ref())?)
}

/// Checks that the model has the parameters and layers that the patterns of the recipe select. Also checks that the
/// model has the layers that the generated sample and QK-Clip require. Builds the model without allocating its
/// parameters.
///
/// # Errors
/// Returns an error for a pattern that matches nothing, with the nearest names, or for a setting that the model does
/// not support.
pub fn check_names(recipe: &Recipe, device: &Device) -> Result<(), Error> {
    let (train, sample) = (&recipe.train, &recipe.sample);
    let drafts = sample.speculative && sample.tokens > 0;
    let has_patterns = !train.freeze.is_empty()
        || !train.optimizer.groups().is_empty()
        || !recipe.fp8.layers.is_empty();
    if !drafts && !has_patterns && train.measures_logits().is_none() {
        return Ok(());
    }
    let builder = builder(recipe, &ParallelContext::single(), device)?;
    recipe.model.check_names(builder, train, drafts)
}

impl RankEstimates {
    /// Estimates the run on every rank, without communication.
    pub fn new(recipe: &Recipe, plan: &ParallelPlan, device: &Device) -> Result<Self, Error> {
        let (mut ranks, mut parameters, mut trained) = (vec![], 0, 0);
        let tensor = recipe.parallel.tensor;
        let mut has_replicas = has_data_replicas(recipe);
        for pipeline in 0..recipe.parallel.pipeline {
            let rank = first_of(&plan.mesh, pipeline);
            let groups = ParallelContext::offline(plan.mesh.clone(), rank)?;
            let builder = builder(recipe, &groups, device)?;
            let sharing = recipe.sharing();
            let mut outline = recipe
                .model
                .outline(builder, &sharing, recipe.sequence_length())?;
            freeze(&mut outline.table, &recipe.train.freeze)?;
            has_replicas |= outline.table.entries().iter().any(|entry| {
                let over_tensor = tensor > 1 && entry.is_replicated_over(Axis::Tensor);
                over_tensor || entry.is_tied()
            });
            let counted = outline.table.entries().iter();
            let counted = counted.filter(|entry| entry.is_first_copy(groups.mesh_rank()));
            for entry in counted {
                parameters += entry.len();
                trained += if entry.frozen { 0 } else { entry.len() };
            }
            ranks.push(RankEstimate::new(recipe, plan, &groups, outline));
        }
        if recipe.train.check_replicas_every.is_some() && !has_replicas {
            return Err(NO_REPLICAS.into());
        }
        Ok(Self {
            ranks,
            parameters,
            trained,
        })
    }

    /// Returns the estimate of rank 0.
    pub fn first(&self) -> &RankEstimate {
        &self.ranks[0]
    }

    /// Checks that the ranks fit into memory, if the size of the memory is known.
    ///
    /// # Errors
    ///
    /// Returns an error with the minimum memory of the ranks and the available memory.
    pub fn check(&self, mesh: &Mesh, ranks: &RankSetup, device: DeviceKind) -> Result<(), Error> {
        match device {
            DeviceKind::Cpu => self.check_in(mesh, ranks, HostMemory::read()),
            // The size of GPU memory is not queried.
            DeviceKind::Wgpu | DeviceKind::Cuda => Ok(()),
        }
    }

    fn check_in(&self, mesh: &Mesh, ranks: &RankSetup, memory: HostMemory) -> Result<(), Error> {
        let need = |rank: usize| self.ranks[mesh.coordinates(rank).pipeline].need;
        let mut all: Vec<RequiredMemory> = (0..mesh.world_size()).map(need).collect();
        // With several processes, it is unknown which ranks run on this machine. Assume the ranks that need the least
        // memory.
        all.sort_by_key(RequiredMemory::total);
        let here = RequiredMemory::sum(all.into_iter().take(ranks.on_this_machine));
        // Each process may have its own cgroup.
        let own = ranks.own_rank.map_or(here, need);
        let check = |need: RequiredMemory, limit: Option<MemoryLimit>| {
            need.check(limit)
                .map_err(|error| format!("{error}; --ignore-memory skips this check"))
        };
        check(own, memory.cgroup)?;
        Ok(check(here, memory.machine)?)
    }
}

/// Returns the first rank with this pipeline coordinate.
pub fn first_of(mesh: &Mesh, pipeline: usize) -> usize {
    let mut ranks = 0..mesh.world_size();
    let found = ranks.find(|rank| mesh.coordinates(*rank).pipeline == pipeline);
    found.unwrap_or(0)
}

impl RankEstimate {
    fn new(
        recipe: &Recipe,
        plan: &ParallelPlan,
        groups: &ParallelContext,
        outline: Outline,
    ) -> Self {
        let Outline {
            table,
            kernels,
            sharing,
            flops_per_token,
        } = outline;
        let train = &recipe.train;
        let has_loss = match &plan.schedule {
            None => true,
            Some(schedule) => {
                let own = schedule.stages_of(groups.pipeline().rank());
                own.into_iter().any(|stage| plan.stages[stage].loss)
            }
        };
        let computing = recipe.data_parallel.precision.of(DType::F32);
        let logits = LogitsShape {
            tokens: train
                .micro_batch_size
                .saturating_mul(recipe.sequence_length()),
            width: recipe.model.local_logits(&plan.layout),
            // A lower bound: chunks keep a weight gradient too.
            hidden: 0,
            size: computing.size(),
        };
        let tokens = if kernels.is_fused(Operation::Loss) {
            logits.tokens_per_chunk(kernels.loss_chunk_size())
        } else {
            logits.tokens
        };
        let logits = [tokens, logits.width, logits.size].map(|n| n as u128);
        let logits = logits.into_iter().product::<u128>();
        let share = train.global_batch_size / recipe.parallel.data_size();
        let need = RequiredMemory::new(
            &sharing.memory,
            if has_loss { logits } else { 0 },
            share <= train.micro_batch_size,
            train.steps <= 1,
        );
        Self {
            need: RequiredMemory {
                parameters: need.parameters.saturating_add(recipe.model.table_bytes()),
                ..need
            },
            parameters: table.local_elements(groups.mesh_rank()),
            kernels,
            flops_per_token,
            sharing,
        }
    }
}

#[cfg(test)]
#[path = "estimate_tests.rs"]
mod tests;
