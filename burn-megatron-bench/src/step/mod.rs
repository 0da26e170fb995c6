//! The `burn-megatron-bench step` benchmark: the time of whole training steps of a model on one device.

pub mod args;
mod report;

use burn::tensor::{DType, Device};
use burn_megatron::data_parallel::Precision;
use burn_megatron::device::{DeviceKind, is_unchecked};
use burn_megatron::kernel_selection::AttentionChoice;
use burn_megatron::kernels::gemm::engine_of;
use burn_megatron_cli::internal::{
    DEFAULT_RECIPE, Error, Families, Model, NamedModel, Recipe, RecipeLayers, median,
    run as timed_steps, set_steps,
};
use serde::Deserialize;
use serde_json::json;

use crate::peer::Peer;
use crate::report::Report;
use args::StepBenchArgs;
use report::{COLUMNS, StepRow, StepSettings, TorchSteps, known_peak_tflops};

/// The Python program that runs the same steps in PyTorch.
const TORCH: &str = include_str!("../../python/torch_step.py");

/// Measures the step time of each model with each implementation of attention, and prints a table.
pub fn run(args: &StepBenchArgs) -> Result<(), Error> {
    measure(args, &args.device.checked()?)?.finish("")
}

fn measure(args: &StepBenchArgs, device: &Device) -> Result<Report<StepSettings, StepRow>, Error> {
    let precision = args.precision.unwrap_or(match args.device {
        DeviceKind::Cpu => Precision::F32,
        DeviceKind::Wgpu | DeviceKind::Cuda => Precision::Bf16,
    });
    let dtype = precision.of(DType::F32);
    if !device.supports_dtype(dtype) {
        let kind = args.device;
        return Err(
            format!("--device {kind} does not support {dtype:?}; use another --precision").into(),
        );
    }
    let name = args.device.name();
    let known = known_peak_tflops(&name).filter(|_| dtype.size() == 2);
    let settings = StepSettings {
        device: name,
        precision: format!("{dtype:?}").to_lowercase(),
        gemm_engine: engine_of(device),
        unchecked: is_unchecked(),
        peak_tflops: args.peak_tflops.or(known),
        warm_up: args.warm_up,
    };
    let mut torch = torch(args, &settings.precision)?;
    let peak = settings.peak_tflops;
    let mut report = Report::begin(&settings.about(), COLUMNS, settings, &args.json);
    for (name, recipe) in recipes(args, precision)? {
        for attention in &args.attention {
            let mut round = || -> Result<StepRow, Error> {
                let row = time(
                    &name,
                    recipe.clone(),
                    *attention,
                    (device, args.warm_up),
                    peak,
                )?;
                with_torch(row, torch.as_mut())
            };
            let rounds = || {
                let mut row = round()?;
                for _ in 1..args.rounds {
                    row.add(round()?);
                }
                Ok(vec![row])
            };
            let (size, batches) = (recipe.train.micro_batch_size, args.micro_batches);
            let failed = |reason| {
                json!({"name": name, "attention": attention.to_string(), "micro_batch_size": size,
                       "micro_batches": batches, "reason": reason})
            };
            let title = format!("{name} {attention} {batches} x {size}");
            let before = report.results.rows.len();
            report.attempt(&title, failed, rounds)?;
            let new = report.results.rows[before..].iter();
            for line in new.filter_map(StepRow::torch_line) {
                println!("{line}");
            }
        }
    }
    Ok(report)
}

/// Starts PyTorch in another process, if `--python` is set.
fn torch(args: &StepBenchArgs, precision: &str) -> Result<Option<Peer>, Error> {
    let Some(python) = &args.python else {
        return Ok(None);
    };
    if args.device != DeviceKind::Cpu {
        let kind = args.device;
        return Err(format!(
            "--python requires --device cpu, because two processes would share {kind}: use --json, then run \
             burn-megatron-bench/python/torch_step.py"
        )
        .into());
    }
    let settings = json!({
        "threads": rayon::current_num_threads(),
        "device": "cpu",
        "precision": precision,
        "warm_up": args.warm_up,
    });
    Peer::start(python, TORCH, &settings).map(Some)
}

/// Adds the time of the same steps in PyTorch to the row, if `--python` is set.
fn with_torch(mut row: StepRow, torch: Option<&mut Peer>) -> Result<StepRow, Error> {
    let Some(peer) = torch else {
        return Ok(row);
    };
    let answer: Option<TorchAnswer> = serde_json::from_value(peer.ask(&json!(row))?)?;
    let Some(answer) = answer else {
        let name = &row.name;
        return Err(format!(
            "--python conflicts with {name}: burn-megatron-bench/python/torch_step.py has no such model"
        )
        .into());
    };
    row.torch = Some(TorchSteps {
        name: peer.name.clone(),
        ratios: vec![median(&answer.seconds) / median(&row.seconds)],
        seconds: answer.seconds,
        peak_bytes: answer.peak_bytes,
    });
    Ok(row)
}

#[derive(Deserialize)]
struct TorchAnswer {
    seconds: Vec<f64>,
    peak_bytes: Option<u64>,
}

/// Returns the recipe of each model with each micro-batch size.
fn recipes(args: &StepBenchArgs, precision: Precision) -> Result<Vec<(String, Recipe)>, Error> {
    let models = match &args.recipe {
        Some(path) => {
            let families = Families::transformers();
            let base = (&families, DEFAULT_RECIPE);
            let layers = RecipeLayers::new(base, Some(path), &args.set);
            let recipe = layers.read()?.recipe;
            let ranks = recipe.plan()?.mesh.world_size();
            if ranks != 1 {
                let path = path.display();
                return Err(format!(
                    "invalid recipe {path}: expected a recipe for 1 rank, got {ranks}"
                )
                .into());
            }
            vec![("recipe".to_string(), recipe)]
        }
        None => {
            args.set.need("--recipe")?;
            named(args).into_iter().map(recipe_of).collect()
        }
    };
    let sizes = |own: usize| match args.micro_batch_size.as_slice() {
        [] => vec![own],
        given => given.to_vec(),
    };
    let mut recipes = vec![];
    for (name, recipe) in models {
        for size in sizes(recipe.train.micro_batch_size) {
            let mut recipe = recipe.clone();
            recipe.data_parallel.precision = precision;
            let batch = [size, size * args.micro_batches];
            set_steps(&mut recipe, batch, args.warm_up + args.steps);
            for choices in &args.kernels {
                recipe.kernels.set(choices)?;
            }
            recipe.kernels.check_measured()?;
            recipes.push((name.clone(), recipe));
        }
    }
    Ok(recipes)
}

fn named(args: &StepBenchArgs) -> Vec<NamedModel> {
    match (args.model.as_slice(), args.device) {
        ([], DeviceKind::Cpu) => vec![NamedModel::Tiny],
        ([], DeviceKind::Wgpu | DeviceKind::Cuda) => vec![NamedModel::Small],
        (given, _) => given.to_vec(),
    }
}

/// Returns the settings of nanoGPT's GPT-2, without dropout.
pub fn recipe_of(model: NamedModel) -> (String, Recipe) {
    let mut recipe = Recipe {
        model: Model::of_hf(model.family(), model.config()),
        ..Recipe::default()
    };
    recipe.train.micro_batch_size = model.micro_batch_size();
    recipe.train.learning_rate = 6e-4;
    recipe.train.min_learning_rate = 6e-5;
    (model.name().into(), recipe)
}

fn time(
    name: &str,
    mut recipe: Recipe,
    attention: AttentionChoice,
    (device, warm_up): (&Device, usize),
    peak_tflops: Option<f64>,
) -> Result<StepRow, Error> {
    recipe.kernels.attention = attention;
    let timed = timed_steps(&recipe, device, warm_up)?;
    let train = &recipe.train;
    let length = train.sequence_length.unwrap_or(recipe.model.context());
    let batches = train.global_batch_size / train.micro_batch_size;
    let batch = [train.micro_batch_size, batches, length];
    let model = serde_json::to_value(&recipe.model)?;
    Ok(StepRow::new(name, model, batch, timed, peak_tflops))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::report::{Results, row_line};
    use crate::test_flags::parse_text;

    fn measured(flags: &str) -> Result<Results<StepSettings, StepRow>, Error> {
        Ok(measure(&parse_text(flags)?, &Device::flex())?.results)
    }

    #[test]
    fn the_tiny_model_is_timed_with_each_form_of_attention() {
        let flags = "--attention auto,unfused --micro-batch-size 1 --micro-batches 2 --steps 3 --warm-up 1 \
                     --peak-tflops 0.5";
        let report = measured(flags).unwrap();
        let forms: Vec<_> = report.rows.iter().map(|row| &row.attention[..]).collect();
        assert_eq!(forms, ["portable", "unfused"]);
        for row in &report.rows {
            assert_eq!(row.seconds.len(), 3);
            assert!(row.seconds.iter().all(|seconds| *seconds > 0.0));
            assert_eq!([row.micro_batches, row.sequence_length], [2, 128]);
            assert!(row.mfu().unwrap() > 0.0);
            assert_eq!(row.peak_bytes.is_some(), cfg!(target_os = "linux"));
            assert_eq!(row.model["family"], "gpt2");
            let line = row_line(COLUMNS, row);
            assert!(line.contains("2 x 1 x 128"), "{line}");
        }
        // A token needs 6 FLOPs per weight of a matrix multiplication, and 6 layers x hidden x tokens FLOPs for
        // attention.
        let weights = 4 * 12 * 128 * 128 + 256 * 128;
        let expected = 6.0 * weights as f64 + (6 * 4 * 128 * 128) as f64;
        assert_eq!(report.rows[0].flops_per_token.round(), expected);
    }

    #[test]
    fn a_recipe_is_timed_with_its_own_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recipe.toml");
        let write = |text: &str| fs::write(&path, format!("base = \"none\"\n{text}")).unwrap();
        let flags = format!("--recipe {} --steps 1 --warm-up 1", path.display());
        write(
            "[model]\nfamily = \"llama\"\ncontext = 16\nlayers = 1\n[train]\nmicro_batch_size = 2",
        );
        let report = measured(&flags).unwrap();
        let row = &report.rows[0];
        assert_eq!(row.model["family"], "llama");
        assert_eq!(
            [row.micro_batch_size, row.micro_batches, row.sequence_length],
            [2, 1, 16]
        );
        write("[parallel]\ntensor = 2");
        let error = measured(&flags).unwrap_err().to_string();
        assert!(
            error.ends_with("expected a recipe for 1 rank, got 2"),
            "{error}"
        );
    }

    #[test]
    fn a_row_that_fails_says_why_and_the_rows_after_it_run() {
        let flags = "--attention mma,portable --micro-batch-size 1 --steps 1 --warm-up 1";
        let report = measured(flags).unwrap();
        assert_eq!(report.rows[0].attention, "portable");
        assert_eq!(
            report.failed[0]["reason"],
            "kernels: attention cannot use mma: a CPU has no tensor cores; use auto or portable"
        );
        for flags in ["--attention cuda", "--model 7b", "--steps 0", "--warm-up 0"] {
            assert!(parse_text::<StepBenchArgs>(flags).is_err(), "{flags}");
        }
    }
}
