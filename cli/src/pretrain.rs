//! `burn-megatron pretrain`.

use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use burn::tensor::DType;
use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::comm::testing::inject::{Fault, FaultKind, Plan as Faults};
use burn_megatron::data_parallel::Moments;
use burn_megatron::device::DeviceKind;
use burn_megatron::optim::LossScale;
use burn_megatron::partial::replace_file;
use burn_megatron::train::Outcome;
use burn_megatron::train::metrics::{HeldOutMetrics, read_metrics};
use burn_megatron::train::plot::LossCurve;
use burn_megatron::train::run_folder::RunFolder;

use crate::cli::PretrainArgs;
use crate::data::{self, Unit};
use crate::fp8::{self, report};
use crate::interrupt::{self, Interrupt};
use crate::outline::Outlines;
use crate::rank_run::{Memory, RankResult, RankRun};
use crate::ranks::{self, seconds};
use crate::recipe::{Error, Recipe};
use crate::start::{Begin, Begun};
use crate::{trace, weights};

/// How often rank 0 tells the others, at least, that it still looks for a checkpoint.
const LONGEST_BEAT: Duration = Duration::from_secs(5);

/// Trains, and shows how it went.
pub fn run(args: &PretrainArgs) -> Result<ExitCode, Error> {
    let recipe = Recipe::resolve(args)?;
    let plan = recipe.plan()?;
    fp8::check_report(&recipe, &args.fp8)?;
    args.saving.check()?;
    if args.print_recipe {
        print!("{}", toml::to_string(&recipe)?);
        return Ok(ExitCode::SUCCESS);
    }
    let ranks = ranks::of(&args.ranks, args.device, plan.mesh.world_size())?;
    let (own_rank, local_rank) = (ranks.own_rank, ranks.local_rank);
    let mut world = ranks.world.clone();
    let faults = Faults::new(args.inject.clone());
    faults.check(plan.mesh.world_size())?;
    let steps = recipe.train.steps as u64;
    faults.check_steps(0..steps)?;
    if own_rank.is_none() {
        check_can_start(&args.inject)?;
    }
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
    world.check()?;
    // The devices are asked for once, here: what is wrong with them is said before anything starts.
    let devices = args.device.devices()?;
    check_types(&recipe, args.device, |dtype| {
        devices[0].supports_dtype(dtype)
    })?;
    let computing = recipe.data_parallel.precision.of(DType::F32);
    recipe
        .model
        .check_kernels(&recipe.kernels, &devices[0], computing)?;
    let outlines = Outlines::new(&recipe, &plan, &devices[0])?;
    if !args.ignore_memory {
        outlines.check(&plan.mesh, &ranks, args.device)?;
    }
    let data = data::open(&recipe)?;
    let tokenizer = data::sample_tokenizer(&recipe)?;
    let load = args.saving.load.as_deref();
    let weights = load.map(|path| weights::open(path, &recipe.model, &args.saving));
    let weights = weights.transpose()?;
    if let Some(rank) = own_rank.filter(|rank| faults.never_starts(*rank)) {
        return stay_away(rank, args);
    }
    let deadline = seconds("deadline", args.ranks.deadline)?;
    let first_deadline = seconds("first-deadline", args.ranks.first_deadline)?;
    let interrupt = Interrupt::listen(seconds("grace", args.grace)?)?;
    let has_first = own_rank.is_none_or(|rank| rank == 0);
    let begin = has_first.then(|| Begin::new(args, &recipe, &*data));
    let begin = begin.transpose()?;
    match (&begin, own_rank) {
        // The other ranks are there first, and wait: to read a checkpoint may take long.
        (Some(begin), Some(_)) => begin.check()?,
        (Some(begin), None) => match begin.begun()? {
            Begun::Over(over) => {
                println!("{over}");
                return Ok(ExitCode::SUCCESS);
            }
            Begun::Run(start) => {
                let first = start.from.as_ref().map_or(0, |from| from.step);
                faults.check_steps(first..steps)?;
            }
        },
        (None, _) => {}
    }
    let results = world.run(|rank| {
        let place = if own_rank.is_some() {
            local_rank
        } else {
            rank.rank()
        };
        let run = RankRun {
            recipe: &recipe,
            plan: &plan,
            outlines: &outlines,
            data: &*data,
            begin: begin.as_ref().filter(|_| rank.rank() == 0),
            saving: &args.saving,
            weights: weights.as_deref(),
            tokenizer: tokenizer.as_ref(),
            faults: &args.inject,
            deadline,
            beat: LONGEST_BEAT.min(deadline.min(first_deadline) / 4),
            device: args.device,
            fp8_report: args.fp8.fp8_report,
        };
        run.train(&rank, &devices[place % devices.len()], &interrupt)
    });
    let result = results?.swap_remove(0);
    let begun = begin.as_ref().map(Begin::begun).transpose()?;
    match (begun, result) {
        (Some(Begun::Run(start)), Some(result)) => {
            let not_struck = result.not_struck.join(", ");
            let is_wrong = !result.outcome.stopped && !not_struck.is_empty();
            let code = finish(args, &recipe, data::unit(&*data), &start.folder, result)?;
            if is_wrong {
                return Err(
                    format!("{not_struck} has not struck: the rank made no such call").into(),
                );
            }
            Ok(code)
        }
        (Some(Begun::Over(over)), _) => {
            println!("{over}");
            Ok(ExitCode::SUCCESS)
        }
        // Another process shows it.
        (_, Some(result)) if result.outcome.stopped => Ok(ExitCode::from(interrupt::EXIT_CODE)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Checks that no fault keeps a thread from starting: it is the processes that can be missing.
fn check_can_start(faults: &[Fault]) -> Result<(), Error> {
    let never = |fault: &&Fault| fault.kind == FaultKind::NeverStarts;
    match faults.iter().find(never) {
        None => Ok(()),
        Some(fault) => Err(format!(
            "{fault} is about a rank that is a process, and all ranks are threads of this one; start them \
             with `burn-megatron launch` or mpirun"
        )
        .into()),
    }
}

/// What a rank does that is told never to start: it stays away until the others have missed it.
fn stay_away(rank: usize, args: &PretrainArgs) -> Result<ExitCode, Error> {
    sleep(seconds("first-deadline", args.ranks.first_deadline)? + Duration::from_secs(60));
    Err(format!("rank {rank} was told never to start").into())
}

/// Checks that a device, which `has` some types, has those that the run computes in and keeps.
fn check_types(
    recipe: &Recipe,
    kind: DeviceKind,
    has: impl Fn(DType) -> bool,
) -> Result<(), Error> {
    let config = &recipe.data_parallel;
    let moments = match config.moments {
        Moments::F32 => DType::F32,
        Moments::Bf16 => DType::BF16,
    };
    let name = |dtype: DType| format!("{dtype:?}").to_lowercase();
    for (key, dtype) in [
        ("precision", config.precision.of(DType::F32)),
        ("moments", moments),
    ] {
        if !has(dtype) {
            let types = [DType::F32, DType::BF16, DType::F16].into_iter();
            let fits: Vec<_> = types.filter(|dtype| has(*dtype)).map(name).collect();
            return Err(format!(
                "{key} = {} is a type that --device {kind} does not have; it has {}",
                name(dtype),
                fits.join(" and "),
            )
            .into());
        }
    }
    Ok(())
}

/// The plots, the sample and the closing lines.
fn finish(
    args: &PretrainArgs,
    recipe: &Recipe,
    unit: Unit,
    folder: &RunFolder,
    result: RankResult,
) -> Result<ExitCode, Error> {
    let RankResult {
        outcome, sample, ..
    } = &result;
    trace::write(folder, result.ranks, &result.events)?;
    let records = read_metrics(&folder.metrics())?;
    let curve = LossCurve::from_records("Loss", &records);
    curve.write_svg(&folder.loss_svg())?;
    println!("{}", curve.terminal(90));
    if let Some(sample) = sample {
        replace_file(&folder.sample(), sample.as_bytes())?;
        println!("sample after {:?}:\n{sample}\n", recipe.sample.prompt);
    }
    report::write(folder, &result.fp8)?;
    print_memory(&result.memory);
    let held_out = outcome.held_out;
    println!("{}", of_held_out(&held_out, unit, outcome.steps));
    println!("written to {}", folder.path().display());
    let loss_scale = recipe.train_config().loss_scale();
    let is_dynamic = matches!(loss_scale, LossScale::Dynamic(_));
    if outcome.without_targets > 0 {
        println!(
            "{} of {} steps were skipped, as none of their targets counts: all are masked",
            outcome.without_targets, outcome.steps,
        );
    }
    let not_finite = outcome.skipped - outcome.without_targets;
    if not_finite > 0 {
        let helps = match is_dynamic {
            true => "that is how a dynamic loss scale is found",
            false => "a lower --lr helps",
        };
        println!(
            "{not_finite} of {} steps were skipped, as a loss or a gradient was not finite; {helps}",
            outcome.steps,
        );
    }
    if loss_scale != LossScale::None {
        println!("loss scale {} at the end", result.loss_scale);
    }
    if outcome.stopped {
        println!(
            "interrupted after {} of {} steps",
            outcome.steps, recipe.train.steps
        );
        if recipe.checkpoint.save {
            let device = match args.device {
                DeviceKind::Cpu => String::new(),
                device => format!(" --device {device}"),
            };
            let folder = folder.path().display();
            println!("go on with pretrain --resume {folder}{device}");
        }
    }
    println!("{}", where_the_weights_are(recipe, folder)?);
    if outcome.stopped {
        return Ok(ExitCode::from(interrupt::EXIT_CODE));
    }
    judge(outcome)
}

/// Whether the run learnt something.
fn judge(outcome: &Outcome) -> Result<ExitCode, Error> {
    let (step, what) = match outcome.diverged {
        Some(step) => (step + 1, "from there on no loss is finite"),
        None => (outcome.steps, "the held-out loss after it is not finite"),
    };
    if outcome.has_diverged() {
        return Err(format!(
            "training diverged at step {step}: {what}; lower --lr, or lengthen the warm-up"
        )
        .into());
    }
    match outcome.skipped == outcome.steps {
        true => Err("the run learnt nothing: every step was skipped".into()),
        false => Ok(ExitCode::SUCCESS),
    }
}

/// The last held-out loss, and what is minimised beside it.
fn of_held_out(held_out: &HeldOutMetrics, unit: Unit, steps: usize) -> String {
    if held_out.tokens == 0 {
        return "held-out loss: there is none, as no held-out target counts: all are masked".into();
    }
    let loss = unit.show(held_out.loss, held_out.bits_per_byte);
    let tokens = held_out.tokens;
    let mut text = format!("held-out loss {loss} after {steps} steps, on {tokens} tokens");
    if let Some(objective) = held_out.minimised.objective {
        text += &format!("\nobjective {objective:.4} there: the loss");
        for (name, term) in held_out.minimised.terms() {
            text += &format!(" + {name} {term:.4}");
        }
    }
    text
}

/// The last line.
fn where_the_weights_are(recipe: &Recipe, folder: &RunFolder) -> Result<String, Error> {
    if !recipe.checkpoint.save {
        return Ok("the weights are lost, as nothing was to be saved (--no-save)".into());
    }
    let latest = Checkpoint::open(folder.checkpoints())?;
    Ok(format!("the weights are in {}", latest.path().display()))
}

/// What rank 0 was to hold, and what it held.
fn print_memory(memory: &Memory) {
    println!("memory of rank 0, without activations; measured: the most of each kind\n");
    println!("{}\n", memory.planned.table(Some(&memory.peak)));
    if !memory.counts_optimizer {
        println!("the moments of an unfused optimizer are not measured");
    }
    if let Some(blocks) = memory.most_blocks {
        println!("blocks gathered at once: at most {blocks}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::data_parallel::Precision;
    use burn_megatron::train::metrics::Minimised;
    use clap::Parser;

    use crate::cli::{Cli, Command};

    /// The flags as they are typed.
    fn pretrain(flags: &str) -> Result<ExitCode, Error> {
        let words = ["burn-megatron", "pretrain"].into_iter();
        match Cli::parse_from(words.chain(flags.split_whitespace())).command {
            Command::Pretrain(args) => run(&args),
            _ => unreachable!("pretrain was asked for"),
        }
    }

    #[test]
    fn a_fault_strikes_at_the_step_of_the_run() {
        let runs = std::env::temp_dir().join(format!("faults-of-a-run-{}", std::process::id()));
        let flags = format!(
            "--tp 2 --dp 1 --pp 1 --steps 3 --deadline 20 --runs {} --inject error@rank=1,step=1,call=2",
            runs.display()
        );
        let error = pretrain(&flags).unwrap_err().to_string();
        std::fs::remove_dir_all(&runs).unwrap();
        let wanted = "error@rank=1,step=1,call=2 strikes rank 1, step 1, call 2";
        assert!(error.contains(wanted), "{error}");
        for (flags, wanted) in [
            (
                "--steps 3 --inject nan@rank=0,step=3,call=0",
                "nan@rank=0,step=3,call=0 is about no step of this run; steps 0 to 2 would fit",
            ),
            (
                "--inject never-starts@rank=1",
                "never-starts@rank=1 is about a rank that is a process, and all ranks are threads of this \
                 one; start them with `burn-megatron launch` or mpirun",
            ),
        ] {
            assert_eq!(pretrain(flags).unwrap_err().to_string(), wanted);
        }
        let error = pretrain("--tp 2 --inject kill@rank=8,call=0").unwrap_err();
        assert_eq!(
            error.to_string(),
            "kill@rank=8,call=0 is about no rank of a world of 8; ranks 0 to 7 would fit"
        );
    }

    #[test]
    fn what_is_minimised_stands_under_the_held_out_loss() {
        let mut held_out = HeldOutMetrics {
            step: 3,
            loss: 1.5,
            bits_per_byte: 2.25,
            minimised: Minimised::default(),
            tokens: 16,
        };
        let plain = "held-out loss 1.5000 nats per byte (2.2500 bits) after 3 steps, on 16 tokens";
        assert_eq!(of_held_out(&held_out, Unit::Byte, 3), plain);
        held_out.minimised = Minimised {
            objective: Some(1.75),
            label_smoothing: Some(0.125),
            z_loss: Some(0.125),
        };
        assert_eq!(
            of_held_out(&held_out, Unit::Byte, 3),
            format!(
                "{plain}\nobjective 1.7500 there: the loss + label smoothing 0.1250 + z-loss 0.1250"
            )
        );
        (held_out.tokens, held_out.loss) = (0, f64::NAN);
        let none = "held-out loss: there is none, as no held-out target counts: all are masked";
        assert_eq!(of_held_out(&held_out, Unit::Byte, 3), none);
    }

    #[test]
    fn a_type_that_the_device_lacks_is_refused_before_the_start() {
        let mut recipe = Recipe::default();
        let check = |recipe: &Recipe| check_types(recipe, DeviceKind::Wgpu, |x| x != DType::BF16);
        assert!(check(&recipe).is_ok());
        recipe.data_parallel.moments = Moments::Bf16;
        assert_eq!(
            check(&recipe).unwrap_err().to_string(),
            "moments = bf16 is a type that --device wgpu does not have; it has f32 and f16"
        );
        recipe.data_parallel.precision = Precision::Bf16;
        let error = check(&recipe).unwrap_err().to_string();
        assert!(
            error.starts_with("precision = bf16 is a type that"),
            "{error}"
        );
        let devices = DeviceKind::Cpu.devices().unwrap();
        check_types(&recipe, DeviceKind::Cpu, |x| devices[0].supports_dtype(x)).unwrap();
    }
}
