//! The parallel layout of a recipe: its mesh, schedule and stages, checked before a model is built.

use std::fs;

use burn_megatron::mesh::{Axis, Mesh, ParallelConfig, split_evenly};
use burn_megatron::pipeline::schedule::{ActionKind, Schedule, ScheduleConfig, generate, validate};
use burn_megatron::pipeline::split::{LayerSplit, StageLayout};

use crate::error::Error;
use crate::recipe::{Parallel, Recipe};
use crate::{data_parallel, fp8};

impl Recipe {
    /// Makes the parallel layout, and checks every size that can be checked before a model is built.
    pub fn plan(&self) -> Result<ParallelPlan, Error> {
        let Parallel {
            tensor,
            data,
            sequence_parallel,
            pipeline,
            ..
        } = self.parallel;
        let layout = ParallelConfig::new()
            .with_tensor(tensor)
            .with_data(data)
            .with_pipeline(pipeline);
        for (name, size) in [("tensor", tensor), ("data", data), ("pipeline", pipeline)] {
            if size == 0 {
                return Err(format!("invalid {name} = 0: expected at least 1").into());
            }
        }
        let ranks = tensor.saturating_mul(data).saturating_mul(pipeline);
        let mesh = Mesh::new(&layout, ranks)?;
        if sequence_parallel && tensor == 1 {
            return Err(
                "sequence_parallel = true splits the sequence over the tensor axis, and tensor = 1 does not split it; set \
                 tensor (--tensor-parallel) to 2 or more, or turn it off"
                    .into(),
            );
        }
        self.model.check(tensor, sequence_parallel)?;
        self.train_config().check(data, self.model.context)?;
        data_parallel::check(self)?;
        self.checkpoint.check()?;
        fp8::check(self)?;
        self.data.check()?;
        if sequence_parallel {
            let length = self.train.sequence_length.unwrap_or(self.model.context);
            split_evenly("sequence length", length, Axis::Tensor, tensor)?;
        }
        let sample = self.sample.check();
        sample.map_err(|error| format!("[sample] {error}"))?;
        let schedule = self.schedule()?;
        let stages = match &schedule {
            Some(schedule) => self
                .parallel
                .split
                .stages(self.model.layers, schedule.stages())?,
            None => vec![],
        };
        Ok(ParallelPlan {
            layout,
            mesh,
            schedule,
            stages,
        })
    }

    /// The schedule of a pipeline of several ranks.
    fn schedule(&self) -> Result<Option<Schedule>, Error> {
        let parallel = &self.parallel;
        if parallel.pipeline == 1 {
            for (name, given) in [
                ("schedule", parallel.schedule.is_some()),
                ("virtual_stages", parallel.virtual_stages.is_some()),
                ("split", parallel.split != LayerSplit::Even),
                (
                    "defer_embedding_wgrad",
                    parallel.defer_embedding_wgrad.is_some(),
                ),
            ] {
                if given {
                    return Err(format!(
                        "{name} applies to pipelines, and pipeline = 1 has none; set pipeline \
                         (--pipeline-parallel) to 2 or more, or remove {name}"
                    )
                    .into());
                }
            }
            return Ok(None);
        }
        let share = self.train.global_batch_size / parallel.data;
        let micro_batches = share / self.train.micro_batch_size;
        let name = parallel.schedule.as_deref().unwrap_or("1f1b");
        if !name.ends_with(".csv") {
            // Before the schedule is generated: one for more stages than layers can be very long.
            let config = ScheduleConfig::new(name.parse()?, parallel.pipeline, micro_batches);
            let stages = parallel.virtual_stages.unwrap_or(config.virtual_stages);
            let stages = stages.saturating_mul(parallel.pipeline);
            parallel.split.stages(self.model.layers, stages)?;
        }
        let schedule = read_schedule(
            name,
            parallel.pipeline,
            parallel.virtual_stages,
            micro_batches,
        )?;
        let last = schedule
            .actions(schedule.rank_of(schedule.stages() - 1))
            .iter();
        let mut weights = last.filter(|action| action.kind == ActionKind::WeightGradient);
        if parallel.defer_embedding_wgrad.is_some()
            && weights.any(|a| a.stage + 1 == schedule.stages())
        {
            return Err(format!(
                "defer_embedding_wgrad defers weight gradients that are computed with the backward, and the schedule \
                 {name} defers all of them; remove it"
            )
            .into());
        }
        Ok(Some(schedule))
    }
}

/// The parallel layout of a run.
pub struct ParallelPlan {
    /// The sizes of the mesh axes.
    pub layout: ParallelConfig,
    /// The mesh.
    pub mesh: Mesh,
    /// The pipeline schedule; `None` without a pipeline.
    pub schedule: Option<Schedule>,
    /// The contents of each pipeline stage.
    pub stages: Vec<StageLayout>,
}

/// Generates the schedule of a kind, or reads it from a CSV file.
pub fn read_schedule(
    name: &str,
    ranks: usize,
    virtual_stages: Option<usize>,
    micro_batches: usize,
) -> Result<Schedule, Error> {
    if !name.ends_with(".csv") {
        let config = ScheduleConfig::new(name.parse()?, ranks, micro_batches);
        let stages = virtual_stages.unwrap_or(config.virtual_stages);
        return Ok(generate(&config.with_virtual_stages(stages))?);
    }
    let text = fs::read_to_string(name)
        .map_err(|error| format!("cannot read the schedule {name}: {error}"))?;
    let schedule = Schedule::from_csv(name, &text)?;
    validate(&schedule)?;
    let found = (schedule.ranks(), schedule.micro_batches());
    if found != (ranks, micro_batches) {
        return Err(format!(
            "the schedule {name} is for {} ranks and {} micro-batches, the run has {ranks} and \
             {micro_batches}",
            found.0, found.1,
        )
        .into());
    }
    if virtual_stages.is_some_and(|stages| stages * ranks != schedule.stages()) {
        let stages = schedule.stages();
        return Err(
            format!("the schedule {name} has {stages} stages; remove virtual_stages").into(),
        );
    }
    Ok(schedule)
}

#[cfg(test)]
#[path = "recipe_extremes.rs"]
mod extremes;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_without_effect_is_an_error() {
        let mut recipe = Recipe::default();
        recipe.parallel.sequence_parallel = true;
        assert!(
            recipe
                .plan()
                .err()
                .unwrap()
                .to_string()
                .contains("tensor = 1 does not split it")
        );
    }
}
