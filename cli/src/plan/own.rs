//! The plan of a recipe's own layout.

use burn_megatron::mesh::ScheduleSource;
use burn_megatron::nn::RecomputeGranularity;
use burn_megatron_plan::Recompute;
use burn_megatron_plan::fit;
use burn_megatron_plan::hardware::Hardware;
use burn_megatron_plan::search::{FixedSettings, Plan, SearchConfig, SearchReport, search};

use super::source::RecipeModel;
use crate::error::Error;
use crate::memory_limit;
use crate::recipe::Recipe;

/// Plans a recipe in its own layout on all `devices`. The memory is planned for the exact recipe. The time is
/// estimated for the nearest settings that the search supports. These settings may differ in two ways:
///
/// - The layers are split with fewer layers at both ends.
/// - Selective recomputation covers norms and activations instead of other parts of layers.
///
/// # Errors
///
/// Returns an error if the recipe is invalid, if it is for another number of devices, or if the search does not
/// support its layout.
pub fn plan(model: &RecipeModel, devices: usize, hardware: &Hardware) -> Result<Plan, Error> {
    let recipe = model.recipe();
    let ranks = recipe.plan()?.mesh.world_size();
    if ranks != devices {
        return Err(format!(
            "--own-layout: the layout of the recipe has {ranks} ranks, and --devices {devices}: expected {ranks}"
        )
        .into());
    }
    let config = SearchConfig {
        // The memory limit is checked later, with the memory of the recipe.
        memory_limit: u64::MAX / 2,
        fixed: settings(recipe)?,
        top: 1,
        ..model.search_config(devices, hardware)
    };
    let SearchReport { best, counts, .. } = search(model, &config)?;
    let Some(mut plan) = best.into_iter().next() else {
        let why = counts.rejected.iter().next();
        let why = why.map(|(reason, count)| match &count.example {
            Some(example) => format!("{}: {example}", reason.describe()),
            None => reason.describe().into(),
        });
        return Err(format!(
            "--own-layout: the time of this layout cannot be planned: {}",
            why.unwrap_or_else(|| "its sizes do not divide the devices".into())
        )
        .into());
    };
    plan.memory = fit::with_slack(memory_limit::plan(recipe)?.fullest().1.peak);
    Ok(plan)
}

/// Returns the settings of a recipe in the form of search settings.
fn settings(recipe: &Recipe) -> Result<FixedSettings, Error> {
    let layout = recipe.layout();
    let schedule = (layout.pipeline > 1).then(|| layout.schedule.clone().unwrap_or_default());
    let schedule = match schedule {
        None => None,
        Some(ScheduleSource::Kind(kind)) => Some(kind),
        Some(ScheduleSource::File(file)) => {
            return Err(format!(
                "--own-layout: parallel.schedule = \"{file}\" is a CSV file, and only named schedules can be planned"
            )
            .into());
        }
    };
    let stages = schedule.map(|kind| {
        let given = layout.virtual_stages;
        given.unwrap_or(kind.default_virtual_stages())
    });
    Ok(FixedSettings {
        tensor: Some(layout.tensor),
        sequence_parallel: Some(layout.sequence_parallel),
        context: Some(layout.context),
        pipeline: Some(layout.pipeline),
        schedule,
        virtual_stages: stages,
        expert: Some(layout.expert),
        expert_tensor: Some(layout.expert_tensor_size()),
        data: Some(layout.data_size()),
        zero_stage: Some(layout.zero_stage),
        hsdp: layout
            .hsdp
            .or(Some(layout.data_parallel_size()))
            .filter(|_| {
                // Without sharding there are no sharding groups.
                u8::from(layout.zero_stage) > 0
            }),
        given: layout.clone(),
        micro_batch: Some(recipe.train.micro_batch_size),
        recompute: Some(recompute(recipe)),
        offload: Some(recipe.memory.offload.optimizer),
    })
}

fn recompute(recipe: &Recipe) -> Recompute {
    let is_on_host = recipe.memory.offload.activations > 0;
    match recipe.memory.recompute.granularity {
        RecomputeGranularity::None => Recompute::None,
        RecomputeGranularity::Selective => Recompute::Selective,
        RecomputeGranularity::Full if is_on_host => Recompute::FullOffloaded,
        RecomputeGranularity::Full => Recompute::Full,
    }
}
