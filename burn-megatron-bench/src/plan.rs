//! The `burn-megatron-bench plan` benchmark: planned times of layouts compared with measured times.

use std::path::PathBuf;

use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron_cli::internal::{
    DEFAULT_RECIPE, Error, Families, Recipe, RecipeLayers, RecipeModel, SetArgs, at_least_one,
    median, run_in, set_steps,
};
use burn_megatron_plan::accuracy::{self, TimedPlan};
use burn_megatron_plan::hardware::measure;
use burn_megatron_plan::search::{Plan, search};
use clap::Args;

use crate::links::on_threads;
use crate::report::write;

/// The number of rounds. Each round runs all layouts.
const ROUNDS: usize = 3;
/// The number of measured steps of each layout per round. The median over all rounds is reported.
const STEPS: usize = 9;
const WARM_UP: usize = 2;

/// Flags of `plan`.
#[derive(Args)]
pub struct PlanBenchArgs {
    /// Recipe with the model and the batch. Its layout is not used. Default: the recipe of `pretrain` without flags.
    #[arg(long, visible_alias = "config", value_name = "FILE.toml")]
    pub recipe: Option<PathBuf>,
    /// Keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Number of thread-ranks, each with one compute thread.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub ranks: usize,
    /// Number of layouts, evenly spaced from the fastest to the slowest by the plan.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = at_least_one)]
    pub layouts: usize,
    /// Write a scatter plot to this file.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
}

/// Probes the machine, plans the layouts, runs them, and prints planned and measured times.
pub fn run(args: &PlanBenchArgs) -> Result<(), Error> {
    let families = Families::transformers();
    let base = (&families, DEFAULT_RECIPE);
    let layers = RecipeLayers::new(base, args.recipe.as_deref(), &args.set);
    let recipe = layers.read()?.recipe;
    let model = RecipeModel::new(recipe)?;
    let hardware = measure(args.ranks)?;
    let report = search(&model, &model.search_config(args.ranks, &hardware))?;
    let plans = evenly_spaced(&report.best, args.layouts);
    if plans.is_empty() {
        return Err("no layout of this recipe is valid".into());
    }
    // Layouts run in rounds, so that other load of the machine affects all layouts.
    let mut measured = vec![vec![]; plans.len()];
    for _ in 0..ROUNDS {
        for (plan, measured) in plans.iter().zip(&mut measured) {
            measured.extend(seconds(model.with(&plan.candidate), args.ranks)?);
        }
    }
    let timed = plans.iter().zip(&measured);
    let timed = timed.map(|(plan, measured)| TimedPlan {
        name: plan.candidate.to_string(),
        planned: plan.step.seconds,
        measured: median(measured),
    });
    let timed: Vec<_> = timed.collect();
    println!("{:>3}  {:>9} {:>9}  layout", "", "planned s", "measured s");
    for (number, plan) in (1..).zip(&timed) {
        let TimedPlan {
            name,
            planned,
            measured,
        } = plan;
        println!("{number:>3}  {planned:>9.3} {measured:>10.3}  {name}");
    }
    let measured = || timed.iter().map(|plan| plan.measured);
    let slowest = measured().fold(0.0, f64::max);
    let fastest = measured().fold(f64::INFINITY, f64::min);
    let correlation = match accuracy::spearman(&timed) {
        Some(correlation) => format!("{correlation:.2}"),
        None => "undefined (fewer than two different times)".into(),
    };
    let found = format!(
        "rank correlation (Spearman) {correlation}; slowest / fastest {:.2}",
        slowest / fastest
    );
    println!("\n{found}");
    if let Some(path) = &args.svg {
        write(path, accuracy::svg(&found, &timed)?.as_bytes())?;
        println!("written to {}", path.display());
    }
    Ok(())
}

/// Returns `count` plans at equal distances, from the first to the last plan.
fn evenly_spaced(plans: &[Plan], count: usize) -> Vec<&Plan> {
    let count = count.min(plans.len());
    let steps = count.saturating_sub(1).max(1);
    let place = |i: usize| i * (plans.len() - 1) / steps;
    (0..count).map(|i| &plans[place(i)]).collect()
}

/// Returns the seconds of the measured steps on rank 0.
fn seconds(mut recipe: Recipe, ranks: usize) -> Result<Vec<f64>, Error> {
    let batch = [
        recipe.train.micro_batch_size,
        recipe.train.global_batch_size,
    ];
    set_steps(&mut recipe, batch, WARM_UP + STEPS);
    let plan = recipe.plan()?;
    let mut by_rank = on_threads(ranks, |rank| {
        let groups = ParallelContext::new(&plan.layout, rank)?;
        Ok(run_in(&recipe, &groups, &Device::flex(), WARM_UP)?.seconds)
    })?;
    Ok(by_rank.swap_remove(0))
}
