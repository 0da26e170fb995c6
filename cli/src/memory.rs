//! Checks of the settings that save memory.

use burn::tensor::{DType, Device};
use burn_megatron::comm::ParallelContext;
use burn_megatron::kernel_selection::{KernelChoice, Operation};
use burn_megatron::nn::{BuildError, ModelBuilder};

use crate::error::Error;
use crate::parallel_plan::ParallelPlan;
use crate::recipe::Recipe;

/// Describes why the optimizer of a recipe is not the fused AdamW. Returns `None` if it is the fused AdamW.
pub fn not_fused_adamw(recipe: &Recipe) -> Option<String> {
    let optimizer = &recipe.train.optimizer;
    if !optimizer.is_adamw() {
        return Some(format!("train.optimizer.name is {optimizer}"));
    }
    let unfused = recipe.kernels.of(Operation::Optimizer) == KernelChoice::Unfused;
    unfused.then(|| "kernels.optimizer is unfused".into())
}

/// Checks the memory settings against the layout, before a model is built.
pub fn check(recipe: &Recipe, plan: &ParallelPlan) -> Result<(), Error> {
    if recipe.memory.offload.optimizer > 0.0
        && let Some(own) = not_fused_adamw(recipe)
    {
        return Err(format!(
            "[memory.offload] optimizer requires the fused AdamW, but {own}; change it, or remove optimizer"
        )
        .into());
    }
    let recompute = recipe.memory.recompute();
    let of_table = |error| -> Error { format!("[memory.recompute] {error}").into() };
    recompute.check().map_err(of_table)?;
    let stages: Vec<_> = match &plan.stages[..] {
        [] => vec![recipe.model.layers()],
        stages => stages.iter().map(|stage| stage.layers.len()).collect(),
    };
    recompute.check_stages(&stages).map_err(of_table)?;
    let in_flight = match &plan.schedule {
        Some(schedule) => schedule.in_flight(),
        None => vec![1 + usize::from(plan.layout.overlap_moe_expert_parallel_comm)],
    };
    if plan.layout.overlap_moe_expert_parallel_comm {
        recompute.check_moe_overlap().map_err(of_table)?;
    }
    recompute.check_in_flight(&in_flight).map_err(of_table)
}

/// Checks that the model supports the recomputation settings. Builds the model without allocating its parameters.
pub fn check_model(recipe: &Recipe, device: &Device) -> Result<(), Error> {
    let recompute = &recipe.memory.recompute;
    if !recompute.is_on() {
        return Ok(());
    }
    let build = || -> Result<(), BuildError> {
        let computing = recipe.data_parallel.precision.of(DType::F32);
        let builder = ModelBuilder::new(&ParallelContext::single(), device)
            .with_compute_dtype(computing)
            .with_kernels(&recipe.kernels)?
            .with_fp8(&recipe.fp8)?
            .with_recompute(recompute)?
            .with_lora(recipe.lora.as_ref())?;
        recipe.model.check_recompute(builder)
    };
    build().map_err(|error| format!("[memory.recompute] {error}").into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::parsed;

    fn error(text: &str) -> String {
        let recipe = match parsed(text) {
            Ok(recipe) => recipe,
            Err(error) => return error.to_string(),
        };
        let checked = recipe.plan().map(drop);
        let checked = checked.and_then(|()| check_model(&recipe, &Device::flex()));
        checked.expect_err(text).to_string()
    }

    #[test]
    fn settings_that_do_not_fit_are_refused_before_anything_is_built() {
        let cases = [
            (
                "granularity = 'most'",
                "expected one of `none`, `full`, `selective`",
            ),
            (
                "granularity = 'selective'\nmodules = ['norms']",
                "`mla_up_proj`",
            ),
            (
                "granularity = 'selective'\nmodules = ['moe']",
                "moe matches no module",
            ),
            (
                "granularity = 'selective'\npatterns = ['blocks.9']",
                "blocks.0",
            ),
            ("granularity = 'full'\nlayers = 5", "at most 4"),
            ("granularity = 'full'\nlayers = [1, 1]", "1 numbers"),
            ("method = 'block'", "granularity = \"full\""),
            ("granularity = 'full'\nmicro_batches = 1", "fewer than 1"),
            ("granularity = 'full'\nlayer = 5", "unknown field `layer`"),
        ];
        for (settings, wanted) in cases {
            let error = error(&format!("[memory.recompute]\n{settings}"));
            assert!(error.contains(wanted), "{settings}: {error}");
        }
        let overlap = "[parallel]\ndata = 2\nexpert = 2\noverlap_moe_expert_parallel_comm = true\n[model.moe]\nexperts = 4";
        for (settings, wanted) in [
            (
                "[memory.recompute]\ngranularity = 'full'",
                "granularity = \"full\" with overlap_moe_expert_parallel_comm",
            ),
            (
                "[memory.recompute]\ngranularity = 'selective'\nmodules = ['moe']",
                "modules with \"moe\" with overlap_moe_expert_parallel_comm",
            ),
            (
                "[train]\nglobal_batch_size = 8\nmicro_batch_size = 4",
                "use at least 2 micro-batches for each data rank",
            ),
        ] {
            let error = error(&format!("{settings}\n{overlap}"));
            assert!(error.contains(wanted), "{settings}: {error}");
        }
        let unfused = "optimizer = 0.5\n[kernels]\noptimizer = 'unfused'";
        for (settings, wanted) in [
            ("optimizer = 1.5", "expected a fraction from 0 to 1"),
            ("optimizer = nan", "expected a fraction from 0 to 1"),
            ("moments = 0.5", "unknown field `moments`"),
            ("activations = 4096", "the inputs of recomputed blocks"),
            ("prefetch = 2", "offload.activations above 0"),
            (
                "activations = 4096
[memory.recompute]
granularity = 'selective'
modules = ['norm', 'activation']",
                "the inputs of recomputed blocks",
            ),
            ("activations = -1", "invalid value"),
            (unfused, "requires the fused AdamW"),
        ] {
            let error = error(&format!("[memory.offload]\n{settings}"));
            assert!(error.contains(wanted), "{settings}: {error}");
        }
    }

    #[test]
    fn settings_that_fit_are_accepted() {
        let pipeline = "[parallel]\npipeline = 2\n";
        for settings in [
            "",
            "[memory]\noffload.optimizer = 0.5",
            "[memory]\nrecompute.granularity = 'full'\noffload.activations = 4096\noffload.prefetch = 0",
            "[memory]\nrecompute.granularity = 'full'",
            "[memory.recompute]\ngranularity = 'full'\nmethod = 'block'\nlayers = [2, 0]\nmicro_batches = 1",
            "[memory.recompute]\ngranularity = 'selective'\nmodules = ['norm', 'mlp', 'core_attention']\n\
             patterns = ['blocks.1', '**.attention']",
        ] {
            let recipe = parsed(&format!("{pipeline}{settings}")).unwrap();
            recipe.plan().unwrap();
            check_model(&recipe, &Device::flex()).unwrap();
            let again = toml::to_string(&recipe).unwrap();
            assert_eq!(parsed(&again).unwrap(), recipe);
        }
    }
}
