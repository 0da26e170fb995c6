//! Implements `burn-megatron plan`.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use burn_megatron::atomic_file::replace_file;
use burn_megatron::data_parallel::Precision;
use burn_megatron::mesh::LayoutError;
use burn_megatron::regular_file;
use burn_megatron_plan::hardware::{Hardware, measure};
use burn_megatron_plan::memory::{MemoryByKind, RankProfiles};
use burn_megatron_plan::search::{
    FixedSettings, MemoryRefusal, Plan, SearchConfig, SearchReport, search_confirmed,
};
use burn_megatron_plan::{Candidate, Recompute};
use indicatif::HumanBytes;

use crate::error::Error;
use crate::family::{Families, Model};
use crate::memory_limit;
use crate::numbers::count;
use crate::recipe::Recipe;
use crate::recipe::merge::RecipeLayers;
use crate::terminal;

use args::PlanArgs;
use progress::PlanProgress;
use source::RecipeModel;

pub mod args;
mod own;
mod progress;
pub mod source;
mod table;
#[cfg(test)]
mod tests;

/// Maximum size of a hardware file, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Searches for layouts, and prints them. The exit code is 1 if no layout fits.
pub fn run(args: &PlanArgs, families: &Families, default_recipe: &str) -> Result<ExitCode, Error> {
    if let Some(path) = &args.measure {
        return write_measured(path, args.ranks);
    }
    let model = RecipeModel::new(recipe(args, families, default_recipe)?)?;
    if model.recipe().parallel.hybrid_tokens().is_some() {
        let error = LayoutError::HybridContext {
            setting: "plan".into(),
            expected:
                "a layout without it, because the micro-batches depend on the lengths of the documents"
                    .into(),
        };
        return Err(error.into());
    }
    let (devices, hardware) = hardware(args, &model)?;
    if args.own_layout {
        return run_own(args, &model, devices, &hardware);
    }
    let report = planned(args, &model, devices, &hardware)?;
    // The other layouts are checked when their memory is planned.
    if let Some(plan) = &report.nearest {
        check(&model, plan)?;
    }
    if args.json {
        println!(
            "{}",
            serde_json::to_string_pretty(&table::PlanReport::new(&report))?
        );
    } else {
        print(args, &model, &report, (devices, &hardware));
    }
    let Some(best) = report.best.first() else {
        return Ok(ExitCode::FAILURE);
    };
    let recipe = model.with(&best.candidate);
    if let Some(path) = &args.svg {
        let limit = args.memory_limit(&hardware);
        let title = best.candidate.to_string();
        memory_limit::plan(&recipe)?.write_svg(path, &title, Some(limit))?;
        eprintln!("memory drawn to {}", path.display());
    }
    if let Some(path) = &args.write_recipe {
        let text = toml::to_string(&recipe.complete())?;
        replace_file(path, text.as_bytes())
            .map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
        eprintln!("recipe written to {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the plan of the recipe's own layout. The exit code is 1 if it does not fit.
fn run_own(
    args: &PlanArgs,
    model: &RecipeModel,
    devices: usize,
    hardware: &Hardware,
) -> Result<ExitCode, Error> {
    let plan = own::plan(model, devices, hardware)?;
    let limit = args.memory_limit(hardware);
    let fits = plan.memory.total() <= limit;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&table::row(&plan))?);
    } else {
        print_title(args, model, (devices, hardware));
        println!("{}", table::own(&plan));
        if !fits {
            let needed = HumanBytes(plan.memory.total());
            println!("it does not fit: {needed} of {}", HumanBytes(limit));
        }
    }
    if let Some(path) = &args.svg {
        let title = plan.candidate.to_string();
        memory_limit::plan(model.recipe())?.write_svg(path, &title, Some(limit))?;
        eprintln!("memory drawn to {}", path.display());
    }
    Ok(if fits {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Checks that `pretrain` accepts a plan.
fn check(model: &RecipeModel, plan: &Plan) -> Result<(), Error> {
    let checked = model.with(&plan.candidate).plan();
    checked.map_err(|error| format!("{} cannot be run: {error}", plan.candidate))?;
    Ok(())
}

fn print(
    args: &PlanArgs,
    model: &RecipeModel,
    report: &SearchReport,
    hardware: (usize, &Hardware),
) {
    print_title(args, model, hardware);
    match (report.best.first(), &report.nearest) {
        (Some(best), _) => println!("{}\n{}", table::plans(report), table::details(best)),
        (None, Some(nearest)) => println!(
            "no layout fits; the one that needs the least memory, {}:\n\n{}",
            HumanBytes(nearest.memory.total()),
            table::details(nearest)
        ),
        (None, None) => println!("no layout is valid\n"),
    }
    print!("{}", table::counts(report));
}

/// Prints the model, the batch and the devices.
fn print_title(args: &PlanArgs, model: &RecipeModel, (devices, hardware): (usize, &Hardware)) {
    let recipe = model.recipe();
    let title = format!(
        "{}, {}: {} of {} on {devices} x {} with {} each",
        recipe.model.family(),
        recipe.model.describe(),
        count(recipe.train.global_batch_size, "sample"),
        count(model.recipe().sequence_length(), "token"),
        hardware.name,
        HumanBytes(args.memory_limit(hardware)),
    );
    println!("{}\n", terminal::wrapped(&title));
}

/// Returns the recipe whose layout is searched, after a check without other layers.
fn recipe(args: &PlanArgs, families: &Families, default_recipe: &str) -> Result<Recipe, Error> {
    let mut recipe = match (&args.recipe, &args.model) {
        (Some(path), _) => {
            let base = (families, default_recipe);
            RecipeLayers::new(base, Some(path), &args.set)
                .read()?
                .recipe
        }
        (None, Some(path)) => {
            args.set.need("--recipe")?;
            Recipe {
                model: model(path, families)?,
                // Use the defaults of every table.
                ..Recipe::parse("", families)?
            }
        }
        (None, None) => return Err("expected --model or --recipe".into()),
    };
    if args.recipe.is_none() {
        recipe.data_parallel.precision = Precision::Bf16;
    }
    let train = &mut recipe.train;
    train.sequence_length = args.sequence_length.or(train.sequence_length);
    train.global_batch_size = args.global_batch_size.unwrap_or(train.global_batch_size);
    if let Some(precision) = args.precision {
        recipe.data_parallel.precision = precision;
    }
    let length = recipe.sequence_length();
    if length == 0 || length > recipe.model.context() {
        let most = recipe.model.context();
        return Err(format!(
            "invalid --sequence-length {length}: expected 1 to {most}, the model's longest"
        )
        .into());
    }
    if recipe.train.global_batch_size == 0 {
        return Err("invalid --global-batch-size 0: expected at least 1".into());
    }
    Ok(recipe)
}

/// Returns the model of a Hugging Face folder or of its config.json.
fn model(path: &Path, families: &Families) -> Result<Model, Error> {
    let folder = match path.file_name() {
        Some(name) if name == "config.json" => path.parent().unwrap_or(Path::new("")),
        _ => path,
    };
    families.hf(folder)?.config(folder)
}

/// Returns the number of devices and the hardware of a device.
fn hardware(args: &PlanArgs, model: &RecipeModel) -> Result<(usize, Hardware), Error> {
    let ranks = match args.own_layout {
        true => Some(model.recipe().plan()?.mesh.world_size()),
        false => None,
    };
    let (number, name) = args::devices(&args.devices, ranks)?;
    let hardware = match (&args.hardware, name) {
        (Some(_), Some(name)) => {
            return Err(format!(
                "--hardware already defines the device: expected --devices {number}, not {number}x{name}"
            )
            .into());
        }
        (Some(path), None) => {
            let text = regular_file::read_text(path, MAX_BYTES)
                .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            Hardware::parse(&text).map_err(|error| format!("{}: {error}", path.display()))?
        }
        (None, Some(name)) => Hardware::named(name)?,
        (None, None) => {
            return Err(format!(
                "--devices \"{}\" does not name the device: expected {number}xH100, or --hardware FILE",
                args.devices
            )
            .into());
        }
    };
    Ok((number, hardware))
}

/// Returns the best layouts that fit according to the planned memory of the model itself.
fn planned(
    args: &PlanArgs,
    model: &RecipeModel,
    devices: usize,
    hardware: &Hardware,
) -> Result<SearchReport, Error> {
    let given = model.search_config(devices, hardware);
    let fixed = args::fixed(&args.fix, given.fixed.clone())?;
    check_host(&fixed, hardware)?;
    let config = SearchConfig {
        memory_limit: args.memory_limit(hardware),
        fixed,
        top: args.top.into(),
        ..given
    };
    let profiles = RankProfiles::default();
    let memory = |candidate: &Candidate| own_memory(model, candidate, &profiles);
    let progress = PlanProgress::default();
    Ok(search_confirmed(model, &config, &memory, &|at| {
        progress.show(at)
    })?)
}

/// Returns the memory of a candidate on the rank that needs the most, from the model's own operations.
fn own_memory(
    model: &RecipeModel,
    candidate: &Candidate,
    profiles: &RankProfiles,
) -> Result<MemoryByKind, MemoryRefusal> {
    let recipe = model.with(candidate);
    let plan = recipe.plan();
    let plan = plan.map_err(|error| MemoryRefusal::Settings(error.to_string()))?;
    let report = memory_limit::plan_layout(&recipe, plan, profiles);
    let report = report.map_err(|error| MemoryRefusal::Model(error.to_string()))?;
    Ok(report.fullest().1.peak)
}

/// Checks that the hardware has a host if state or activations are offloaded.
fn check_host(fixed: &FixedSettings, hardware: &Hardware) -> Result<(), Error> {
    let wanted = match (fixed.offload, fixed.recompute) {
        _ if hardware.host.is_some() => return Ok(()),
        (Some(share), _) if share > 0.0 => format!("offload = {share}"),
        (_, Some(Recompute::FullOffloaded)) => "recompute = full-offloaded".into(),
        _ => return Ok(()),
    };
    let name = &hardware.name;
    Err(format!(
        "{wanted} cannot be planned: {name} has no [host] with memory, link and bandwidth in its hardware file; add \
         one, or offload nothing"
    )
    .into())
}

fn write_measured(path: &Path, ranks: usize) -> Result<ExitCode, Error> {
    let hardware = measure(ranks)?;
    let text = hardware.to_toml();
    fs::write(path, &text)
        .map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
    println!("{text}\nwritten to {}", path.display());
    Ok(ExitCode::SUCCESS)
}
