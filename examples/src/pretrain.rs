//! `burn-megatron pretrain`.

use std::fs;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::tensor::DType;
use burn_megatron::comm::World;
use burn_megatron::data::{TextData, VOCABULARY};
use burn_megatron::device::DeviceKind;
use burn_megatron::pipeline::engine::Event;
use burn_megatron::pipeline::trace::{TraceEvent, trace_bubble, write_chrome_trace};
use burn_megatron::train::Outcome;
use burn_megatron::train::metrics::read_metrics;
use burn_megatron::train::plot::LossCurve;
use burn_megatron::train::run_folder::RunFolder;

use crate::cli::PretrainArgs;
use crate::header::print_run;
use crate::interrupt::{self, Interrupt};
use crate::rank_run::{RankResult, RankRun};
use crate::recipe::{Error, Recipe};

/// Trains, and shows how it went.
pub fn run(args: &PretrainArgs) -> Result<ExitCode, Error> {
    let recipe = Recipe::resolve(args)?;
    let plan = recipe.plan()?;
    if args.print_recipe {
        print!("{}", toml::to_string(&recipe)?);
        return Ok(ExitCode::SUCCESS);
    }
    if !(args.deadline > 0.0 && args.deadline <= 1e9) {
        return Err(format!("a deadline of {} s makes no sense", args.deadline).into());
    }
    let mut world =
        World::threads(plan.mesh.world_size())?.deadline(Duration::from_secs_f64(args.deadline));
    if let Some(threads) = args.compute_threads {
        if args.device != DeviceKind::Cpu {
            let device = args.device;
            return Err(format!(
                "--compute-threads is about the CPU, and --device {device} does not compute on it"
            )
            .into());
        }
        world = world.compute_threads(threads);
    }
    let text = TextData::open(&data_path(&recipe))?;
    if recipe.model.vocabulary != VOCABULARY {
        return Err(format!(
            "model.vocabulary = {} does not fit byte-level text, which has {VOCABULARY} tokens",
            recipe.model.vocabulary,
        )
        .into());
    }
    let length = recipe.train.sequence_length.unwrap_or(recipe.model.context);
    text.sampler(length, recipe.train.seed)?;
    text.held_out_windows(length, recipe.train.held_out_samples)?;
    // The devices are asked for once, here: what is wrong with them is said before anything starts.
    let devices = args.device.devices()?;
    recipe
        .model
        .check_kernels(&recipe.kernels, &devices[0], DType::F32)?;
    let interrupt = Interrupt::listen()?;
    let folder = run_folder(args)?;
    folder.write_config(&recipe)?;
    let world = world.call_log_dir(folder.path());

    let results = world.run(|rank| {
        let device = &devices[rank.rank() % devices.len()];
        let run = RankRun {
            recipe: &recipe,
            plan: &plan,
            text: &text,
            folder: &folder,
        };
        let kind = args.device;
        let print = || print_run(&recipe, &plan, &text, kind, rank.compute_threads());
        run.train(&rank, device, &interrupt, print)
    });
    let mut results = results?;
    if plan.schedule.is_some() {
        write_trace(&folder, &results)?;
    }
    let RankResult {
        outcome, sample, ..
    } = results.swap_remove(0);
    finish(&recipe, &folder, outcome, sample)
}

/// Writes what each rank did in the last step, and says how much of it was waiting.
fn write_trace(folder: &RunFolder, results: &[RankResult]) -> Result<(), Error> {
    let all = || results.iter().flat_map(|result| &result.events);
    let Some(origin) = all().map(|event| event.start).min() else {
        return Ok(());
    };
    let seconds = |time: Instant| time.duration_since(origin).as_secs_f64();
    let of_rank = |(rank, result): (usize, &RankResult)| {
        let event = |event: &Event| {
            TraceEvent::action(
                rank,
                &event.action,
                seconds(event.start),
                seconds(event.end),
            )
        };
        result.events.iter().map(event).collect::<Vec<_>>()
    };
    let events: Vec<_> = results.iter().enumerate().flat_map(of_rank).collect();
    let path = folder.path().join("trace.json");
    let failed = |error| format!("{} cannot be written: {error}", path.display());
    let file = fs::File::create(&path).map_err(failed)?;
    write_chrome_trace(&events, BufWriter::new(file)).map_err(failed)?;
    println!(
        "bubble of the last step {:.1} % of its time, measured over all ranks (trace.json)",
        100.0 * trace_bubble(results.len(), &events),
    );
    Ok(())
}

/// The plots, the sample and the closing lines.
fn finish(
    recipe: &Recipe,
    folder: &RunFolder,
    outcome: Outcome,
    sample: Option<Vec<u8>>,
) -> Result<ExitCode, Error> {
    let records = read_metrics(&folder.metrics())?;
    let curve = LossCurve::from_records("Loss", &records);
    curve.write_svg(&folder.loss_svg())?;
    println!("{}", curve.terminal(90));
    if let Some(sample) = sample {
        let sample = String::from_utf8_lossy(&sample).into_owned();
        fs::write(folder.sample(), &sample)?;
        println!("sample after {:?}:\n{sample}\n", recipe.sample.prompt);
    }
    let held_out = outcome.held_out;
    println!(
        "held-out loss {:.4} nats per byte ({:.4} bits) after {} steps, on {} tokens",
        held_out.loss, held_out.bits_per_byte, outcome.steps, held_out.tokens,
    );
    println!("written to {}", folder.path().display());
    if outcome.skipped > 0 {
        println!(
            "{} of {} steps were skipped, as a loss or a gradient was not finite; a lower --lr helps",
            outcome.skipped, outcome.steps,
        );
    }
    if outcome.stopped {
        println!(
            "interrupted after {} of {} steps",
            outcome.steps, recipe.train.steps
        );
        return Ok(ExitCode::from(interrupt::EXIT_CODE));
    }
    if outcome.skipped == outcome.steps || !held_out.loss.is_finite() {
        return Err("the run learnt nothing: its loss is not finite".into());
    }
    Ok(ExitCode::SUCCESS)
}

/// The text of the recipe, or of this repository.
fn data_path(recipe: &Recipe) -> PathBuf {
    let repository = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let path = recipe.data.path.clone().unwrap_or_else(repository);
    path.canonicalize().unwrap_or(path)
}

fn run_folder(args: &PretrainArgs) -> Result<RunFolder, Error> {
    let Some(path) = &args.run_dir else {
        return Ok(RunFolder::create(&args.runs, None)?);
    };
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(name) = name else {
        return Err(format!("{} names no folder", path.display()).into());
    };
    if path.exists() {
        return Err(format!("the run folder {} is there already", path.display()).into());
    }
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    Ok(RunFolder::create(
        parent.unwrap_or(Path::new(".")),
        Some(name),
    )?)
}
