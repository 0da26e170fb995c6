//! `burn-megatron bench plan`: planned times of layouts against measured ones.

use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::Device;
use burn_megatron::atomic_file::replace_file;
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron_plan::accuracy::{self, TimedPlan};
use burn_megatron_plan::hardware::measure;
use burn_megatron_plan::search::{Plan, search};

use super::args::PlanBenchArgs;
use super::step::case;
use super::timing::median;
use crate::error::Error;
use crate::family::Families;
use crate::plan::source::RecipeModel;
use crate::recipe::Recipe;
use crate::recipe::merge::RecipeLayers;

/// Timeout of a collective.
const DEADLINE: Duration = Duration::from_secs(300);

/// Probes the machine, plans the layouts, runs them, and prints both times.
pub fn run(
    args: &PlanBenchArgs,
    families: &Families,
    default_recipe: &str,
) -> Result<ExitCode, Error> {
    let base = (families, default_recipe);
    let layers = RecipeLayers::new(base, args.recipe.as_deref(), &args.set);
    let recipe = layers.read()?.recipe;
    let model = RecipeModel::new(recipe)?;
    let hardware = measure(args.ranks)?;
    let report = search(&model, &model.search_config(args.ranks, &hardware))?;
    let plans = evenly_spaced(&report.best, args.layouts);
    if plans.is_empty() {
        return Err("no layout of this recipe is valid".into());
    }
    // In rounds, so that other load of the machine falls on all layouts.
    let mut measured = vec![vec![]; plans.len()];
    for _ in 0..args.rounds {
        for (plan, measured) in plans.iter().zip(&mut measured) {
            measured.extend(seconds(model.with(&plan.candidate), args)?);
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
    let [fastest, slowest] = [
        measured().fold(f64::INFINITY, f64::min),
        measured().fold(0.0, f64::max),
    ];
    let correlation = match accuracy::spearman(&timed) {
        Some(correlation) => format!("{correlation:.2}"),
        None => "none, of fewer than two different times".into(),
    };
    let found = format!(
        "rank correlation (Spearman) {correlation}; slowest / fastest {:.2}",
        slowest / fastest
    );
    println!("\n{found}");
    if let Some(path) = &args.svg {
        replace_file(path, accuracy::svg(&found, &timed)?.as_bytes())
            .map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
        println!("written to {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns `count` of the plans at equal distances, from the first to the last.
fn evenly_spaced(plans: &[Plan], count: usize) -> Vec<&Plan> {
    let count = count.min(plans.len());
    let steps = count.saturating_sub(1).max(1);
    let place = |i: usize| i * (plans.len() - 1) / steps;
    (0..count).map(|i| &plans[place(i)]).collect()
}

/// The measured steps of rank 0.
fn seconds(mut recipe: Recipe, args: &PlanBenchArgs) -> Result<Vec<f64>, Error> {
    recipe.train.steps = args.warm_up + args.steps;
    recipe.train.warmup_steps = 0;
    recipe.train.evaluate_every = None;
    let plan = recipe.plan()?;
    let world = World::threads(args.ranks)?;
    let world = world.compute_threads(1).deadline(DEADLINE);
    let run = |rank| {
        let groups = ParallelContext::new(&plan.layout, &rank)?;
        let timed = case::run_in(&recipe, &groups, &Device::flex(), args.warm_up)?;
        Ok::<_, Error>(timed.seconds)
    };
    Ok(world.run(run)?.swap_remove(0))
}
