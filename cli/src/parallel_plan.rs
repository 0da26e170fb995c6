//! The parallel layout of a recipe: its mesh, schedule and stages, checked before a model is built.

use burn_megatron::mesh::{Axis, ContextSplit, Mesh, ParallelConfig, split_evenly};
use burn_megatron::nn::tp_comm_overlap;
use burn_megatron::pipeline::schedule::{ActionKind, Schedule};
use burn_megatron::pipeline::split::StageLayout;
use burn_megatron::pipeline::{schedule_of, stages_of};

use crate::error::Error;
use crate::recipe::Recipe;
use crate::{data_parallel, fp8, memory};

impl Recipe {
    /// Creates the parallel layout, and checks every size that can be checked before a model is built.
    pub fn plan(&self) -> Result<ParallelPlan, Error> {
        let layout = self.layout();
        let (tensor, data) = (layout.tensor, layout.data_size());
        for (name, size) in [
            ("tensor", tensor),
            ("data", data),
            ("pipeline", layout.pipeline),
            ("context", layout.context),
        ] {
            if size == 0 {
                return Err(format!("invalid {name} = 0: expected at least 1").into());
            }
        }
        let mesh = Mesh::new(&layout, layout.world_size().unwrap_or(usize::MAX))?;
        self.model.check_layout(&layout)?;
        self.model.check_context(&layout)?;
        self.train_config().check(&layout, self.model.context())?;
        data_parallel::check(self)?;
        self.checkpoint.check()?;
        fp8::check(self)?;
        // FP8 for selected layers is checked when they are built.
        let is_fp8 = self.fp8.recipe.is_some() && self.fp8.layers.is_empty();
        if let Some(method) = layout.tp_comm_overlap.filter(|_| is_fp8) {
            return Err(tp_comm_overlap::refuses_fp8(method).into());
        }
        self.data.check()?;
        self.check_sequence(&layout)?;
        let sample = self.sample.check();
        sample.map_err(|error| format!("[sample] {error}"))?;
        let is_pipeline = layout.pipeline > 1;
        let stages = if is_pipeline {
            // Check before generating the schedule: with more stages than layers, a schedule can be very long.
            stages_of(&layout, self.model.layers())?
        } else {
            vec![]
        };
        if is_pipeline || layout.overlap_moe_expert_parallel_comm {
            for samples in self.train.batch_sizes() {
                self.schedule(&layout, samples)?;
            }
        }
        let whole = || self.schedule(&layout, self.train.global_batch_size);
        let schedule = is_pipeline.then(whole).transpose()?;
        let plan = ParallelPlan {
            layout,
            mesh,
            schedule,
            stages,
        };
        memory::check(self, &plan)?;
        Ok(plan)
    }

    /// Checks that the layout can split the sequences.
    pub fn check_sequence(&self, layout: &ParallelConfig) -> Result<(), Error> {
        let is_split = self.model.splits_sequences(layout);
        let tensor = if is_split { layout.tensor } else { 1 };
        for length in self.train_config().row_lengths(self.sequence_length()) {
            match (layout.context, layout.context_split) {
                (1, _) => {
                    split_evenly("sequence length", length, Axis::Tensor, tensor).map(drop)?
                }
                // The rows of this split are padded.
                (_, ContextSplit::ZigzagPerDocument) => {}
                (ranks, split) => split.check(length, ranks, tensor)?,
            }
            tp_comm_overlap::check(layout, length)?;
        }
        Ok(())
    }

    /// Returns the pipeline schedule for steps of `samples` samples.
    fn schedule(&self, layout: &ParallelConfig, samples: usize) -> Result<Schedule, Error> {
        let share = samples / layout.data_size();
        let schedule = schedule_of(layout, share / self.train.micro_batch_size)?;
        let last = schedule
            .actions(schedule.rank_of(schedule.stages() - 1))
            .iter();
        let mut weights = last.filter(|action| action.kind == ActionKind::WeightGradient);
        if layout.defer_embedding_wgrad.is_some()
            && weights.any(|a| a.stage + 1 == schedule.stages())
        {
            return Err(format!(
                "defer_embedding_wgrad conflicts with the schedule {}, which already defers all weight gradients; \
                 remove defer_embedding_wgrad",
                layout.schedule.clone().unwrap_or_default()
            )
            .into());
        }
        Ok(schedule)
    }
}

/// Parallel layout of a run.
pub struct ParallelPlan {
    /// The layout.
    pub layout: ParallelConfig,
    /// The mesh.
    pub mesh: Mesh,
    /// The pipeline schedule, or `None` without a pipeline.
    pub schedule: Option<Schedule>,
    /// The contents of each pipeline stage.
    pub stages: Vec<StageLayout>,
}

#[cfg(test)]
#[path = "recipe_extremes_tests.rs"]
mod extremes;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_no_layer_uses_are_refused() {
        for (setting, wanted) in [
            (
                "context = 3",
                "a sequence of 128 tokens cannot be split over context = 3 ranks",
            ),
            ("data = 2\nexpert = 2", "this model has no experts"),
            ("expert_tensor = 1", "this model has no experts"),
        ] {
            let recipe = crate::recipe::parsed(&format!("[parallel]\n{setting}")).unwrap();
            let error = recipe.plan().err().unwrap().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn experts_are_split_where_there_are_some() {
        let text = "[parallel]\ndata = 4\nexpert = 4\n[model]\nfamily = 'mixtral'";
        let plan = |text: &str| crate::recipe::parsed(text).unwrap().plan();
        assert!(plan(text).is_ok());
        let error = plan(&text.replace("expert = 4", "expert = 3"))
            .err()
            .unwrap();
        assert!(error.to_string().contains('3'), "{error}");
        for (settings, wanted) in [
            ("experts = 6", "experts 6 cannot be split over expert = 4"),
            ("experts_per_token = 9", "invalid experts_per_token = 9"),
        ] {
            let error = plan(&format!("{text}\n[model.moe]\n{settings}"));
            let error = error.err().unwrap().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

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
                .contains("requires tensor parallelism, but tensor = 1")
        );
    }
}
