//! `burn-megatron pretrain`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use burn_megatron::comm::{Groups, Rank, World};
use burn_megatron::data::{TextData, VOCABULARY};
use burn_megatron::device::DeviceKind;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::train::metrics::read_metrics;
use burn_megatron::train::plot::LossCurve;
use burn_megatron::train::run_folder::RunFolder;
use burn_megatron::train::{LanguageModel, Outcome, Trainer, generate};
use burn_megatron_models::Transformer;

use crate::cli::PretrainArgs;
use crate::header::{print_model, print_run};
use crate::interrupt::{self, Interrupt};
use crate::recipe::{Error, Recipe};
use crate::record::Recorder;

/// Trains, and shows how it went.
pub fn run(args: &PretrainArgs) -> Result<ExitCode, Error> {
    let recipe = Recipe::resolve(args)?;
    let (layout, mesh) = recipe.mesh()?;
    if args.print_recipe {
        print!("{}", toml::to_string(&recipe)?);
        return Ok(ExitCode::SUCCESS);
    }
    if !(args.deadline > 0.0 && args.deadline <= 1e9) {
        return Err(format!("a deadline of {} s makes no sense", args.deadline).into());
    }
    let mut world =
        World::threads(mesh.world_size())?.deadline(Duration::from_secs_f64(args.deadline));
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
    let interrupt = Interrupt::listen()?;
    let folder = run_folder(args)?;
    folder.write_config(&recipe)?;
    let world = world.call_log_dir(folder.path());

    let results = world.run(|rank| {
        let device = &devices[rank.rank() % devices.len()];
        let rank_run = RankRun {
            recipe: &recipe,
            layout: &layout,
            text: &text,
            folder: &folder,
        };
        let kind = args.device;
        let print = || print_run(&recipe, &mesh, &text, kind, rank.compute_threads());
        rank_run.train(&rank, device, &interrupt, print)
    });
    let results = results?;
    match results.into_iter().next() {
        Some((outcome, sample)) => finish(&recipe, &folder, outcome, sample),
        None => Err("the run gave no result".into()),
    }
}

/// What every rank works with.
struct RankRun<'a> {
    recipe: &'a Recipe,
    layout: &'a ParallelConfig,
    text: &'a TextData,
    folder: &'a RunFolder,
}

impl RankRun<'_> {
    fn train(
        &self,
        rank: &Rank,
        device: &burn::tensor::Device,
        interrupt: &Interrupt,
        print_run: impl Fn(),
    ) -> Result<(Outcome, Option<Vec<u8>>), Error> {
        let (recipe, seed) = (self.recipe, self.recipe.train.seed);
        let groups = Groups::new(self.layout, rank)?;
        let sequence_parallel = recipe.parallel.sequence_parallel;
        let model = Transformer::on(&recipe.model, &groups, device, seed, sequence_parallel)?;
        let mut trainer = Trainer::new(model, &groups, device, &recipe.train)?;
        if rank.rank() == 0 {
            let length = recipe.train.sequence_length.unwrap_or(recipe.model.context);
            let ddp = trainer.model();
            print_run();
            print_model(
                recipe,
                ddp.table(),
                groups.place(),
                ddp.module().flops_per_token(length),
            );
            println!("folder   {}\n", self.folder.path().display());
        }
        let mut recorder = Recorder::new(rank.rank(), recipe.train.steps, self.folder, interrupt)?;
        let outcome = trainer.fit(self.text, &mut recorder)?;
        recorder.finish();
        let writes = groups.data().rank() == 0 && !outcome.stopped && recipe.sample.tokens > 0;
        let sample =
            writes.then(|| generate(trainer.model().module(), device, &recipe.sample, seed));
        Ok((outcome, sample))
    }
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
