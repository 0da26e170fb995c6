//! What a run will hold, before any of it is allocated.

use burn::tensor::{DType, Device};
use burn_megatron::choice::Chosen;
use burn_megatron::comm::Groups;
use burn_megatron::data_parallel::Outline;
use burn_megatron::data_parallel::machine::{Limit, Memory, Need};
use burn_megatron::device::DeviceKind;
use burn_megatron::mesh::Mesh;
use burn_megatron::nn::{ParallelModule, Scope, Vocabulary};
use burn_megatron::train::LanguageModel;
use burn_megatron_models::Transformer;

use crate::ranks::Ranks;
use crate::recipe::{Error, Plan, Recipe};

/// What the ranks will hold; ranks of one place in the pipeline hold alike.
pub struct Outlines {
    /// By place in the pipeline.
    ranks: Vec<OfRank>,
    /// The parameters of the whole model, each counted once.
    pub parameters: usize,
}

/// What a rank will hold.
pub struct OfRank {
    pub sharing: Outline,
    /// Elements of its parts of parameters.
    pub parameters: usize,
    pub kernels: Chosen,
    pub flops_per_token: f64,
    need: Need,
}

/// Builds what a rank has of the model of a recipe, or its outline.
pub fn build(
    recipe: &Recipe,
    plan: &Plan,
    groups: &Groups,
    device: &Device,
    is_outline: bool,
) -> Result<ParallelModule<Transformer>, Error> {
    let (model, train) = (&recipe.model, &recipe.train);
    let sequence_parallel = recipe.parallel.sequence_parallel;
    // Parameters are built in f32, and stay so as masters where the model computes in 16 bits.
    let computing = recipe.data_parallel.precision.of(DType::F32);
    let scope = Scope::with(groups, device, train.seed, DType::F32)
        .computing_in(computing)
        .with_kernels(&recipe.kernels)?
        .with_fp8(&recipe.fp8)?;
    let scope = if is_outline { scope.outline() } else { scope };
    let Some(schedule) = &plan.schedule else {
        return Ok(model.init(scope, sequence_parallel)?);
    };
    let own = schedule.stages_of(groups.pipeline().rank()).into_iter();
    let own: Vec<_> = own
        .map(|stage| (stage, plan.stages[stage].clone()))
        .collect();
    Ok(model.init_stages(scope, sequence_parallel, &own)?)
}

impl Outlines {
    /// Outlines the run on every rank; nobody is called.
    pub fn new(recipe: &Recipe, plan: &Plan, device: &Device) -> Result<Self, Error> {
        let (mut ranks, mut parameters) = (vec![], 0);
        for pipeline in 0..recipe.parallel.pipeline {
            let rank = first_of(&plan.mesh, pipeline);
            let groups = Groups::without_world(plan.mesh.clone(), rank)?;
            let model = build(recipe, plan, &groups, device, true)?;
            let counted = model.table.entries().iter();
            let counted = counted.filter(|entry| pipeline == 0 || !entry.at_both_ends);
            parameters += counted.map(|entry| entry.len()).sum::<usize>();
            ranks.push(OfRank::new(recipe, plan, &groups, &model)?);
        }
        Ok(Self { ranks, parameters })
    }

    /// Of rank 0.
    pub fn first(&self) -> &OfRank {
        &self.ranks[0]
    }

    /// Checks that the ranks fit into the memory that they have, where that is known.
    ///
    /// # Errors
    ///
    /// An error with the sum of what they need at the least.
    pub fn check(&self, mesh: &Mesh, ranks: &Ranks, device: DeviceKind) -> Result<(), Error> {
        match device {
            DeviceKind::Cpu => self.check_in(mesh, ranks, Memory::read()),
            // What a GPU has is not asked for.
            DeviceKind::Wgpu | DeviceKind::Cuda => Ok(()),
        }
    }

    fn check_in(&self, mesh: &Mesh, ranks: &Ranks, memory: Memory) -> Result<(), Error> {
        let need = |rank: usize| self.ranks[mesh.coordinates(rank).pipeline].need;
        let mut all: Vec<Need> = (0..mesh.world_size()).map(need).collect();
        // Which ranks of several processes are here is not known, so those that need the least are.
        all.sort_by_key(Need::total);
        let here = Need::sum(all.into_iter().take(ranks.on_this_machine));
        // Processes may each have a cgroup of their own.
        let own = ranks.own_rank.map_or(here, need);
        let check = |need: Need, limit: Option<Limit>| {
            need.check(limit)
                .map_err(|error| format!("{error}; --ignore-memory goes on all the same"))
        };
        check(own, memory.cgroup)?;
        Ok(check(here, memory.machine)?)
    }
}

/// A rank with this place in the pipeline.
fn first_of(mesh: &Mesh, pipeline: usize) -> usize {
    let mut ranks = 0..mesh.world_size();
    let found = ranks.find(|rank| mesh.coordinates(*rank).pipeline == pipeline);
    found.unwrap_or(0)
}

impl OfRank {
    fn new(
        recipe: &Recipe,
        plan: &Plan,
        groups: &Groups,
        model: &ParallelModule<Transformer>,
    ) -> Result<Self, Error> {
        let (config, train) = (&recipe.model, &recipe.train);
        let sharing = Outline::of(model, groups, &recipe.data_parallel)?;
        let length = train.sequence_length.unwrap_or(config.context);
        let has_loss = match &plan.schedule {
            None => true,
            Some(schedule) => {
                let own = schedule.stages_of(groups.pipeline().rank());
                own.into_iter().any(|stage| plan.stages[stage].loss)
            }
        };
        let tensor = recipe.parallel.tensor;
        let vocabulary =
            Vocabulary::padded(config.vocabulary, config.vocabulary_divisible_by, tensor);
        let computing = recipe.data_parallel.precision.of(DType::F32);
        let logits = [
            train.micro_batch_size,
            length,
            vocabulary.padded / tensor,
            computing.size(),
        ];
        let logits = logits.map(|n| n as u128).into_iter().product::<u128>();
        let share = train.global_batch_size / recipe.parallel.data;
        let need = Need::new(
            &sharing.memory,
            if has_loss { logits } else { 0 },
            share <= train.micro_batch_size,
            train.steps <= 1,
        );
        let rotary = config.rotary_bytes();
        Ok(Self {
            need: Need {
                parameters: need.parameters.saturating_add(rotary),
                ..need
            },
            parameters: model.table.local_elements(groups.place()),
            kernels: model.kernels.clone(),
            flops_per_token: model.module.flops_per_token(length),
            sharing,
        })
    }
}

#[cfg(test)]
#[path = "outline_tests.rs"]
mod tests;
