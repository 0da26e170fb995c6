//! `burn-megatron pretrain`.

pub mod args;
mod checks;
pub mod resolve;
#[cfg(test)]
mod twins;

use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::DType;
use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::comm::testing::fault_injection::FaultPlan as Faults;
use burn_megatron::data::Padding;
use burn_megatron::data_parallel::format_bytes;
use burn_megatron::device::DeviceKind;
use burn_megatron::mesh::ContextSplit;
use burn_megatron::optim::LossScale;
use burn_megatron::partial::replace_file;
use burn_megatron::train::metrics::{HeldOutMetrics, MetricsRecord, read_metrics};
use burn_megatron::train::plot::{ExpertHeatMap, LossCurve};
use burn_megatron::train::run_folder::RunFolder;
use burn_megatron::train::{GenerateConfig, ReplayError, TrainOutcome};

use crate::data::{self, LossUnit};
use crate::error::Error;
use crate::estimate::RankEstimates;
use crate::family::{Families, RankMemory};
use crate::fp8::{self, report};
use crate::header::{self, print_run};
use crate::interrupt::{self, Interrupt};
use crate::layers::LayeredRecipe;
use crate::memory_limit::PlannedMemory;
use crate::nodes::LocalRank;
use crate::numbers::{count, grouped};
use crate::rank_run::{RankResult, RankRun, print_training};
use crate::ranks::{self, seconds};
use crate::recipe::Recipe;
use crate::start::{StartDecision, StartResolver};
use crate::weights::InitialWeights;
use crate::{determinism, gemm_algorithms, lora, memory, save_hf, terminal, trace};
use args::PretrainArgs;
use checks::{check_can_start, check_cuda_graph, check_memory, check_types, never_start};

/// The longest interval at which rank 0 signals the others while it looks for a checkpoint.
const MAX_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// Trains, and prints the results; signals of this process stop the run.
pub fn run(
    args: &PretrainArgs,
    families: &Families,
    default_recipe: &str,
) -> Result<ExitCode, Error> {
    run_until(args, families, default_recipe, Interrupt::listen)
}

/// The same with what stops the run; a process can listen to its signals once.
fn run_until(
    args: &PretrainArgs,
    families: &Families,
    default_recipe: &str,
    interrupt: impl FnOnce(Duration) -> Result<Interrupt, ctrlc::Error>,
) -> Result<ExitCode, Error> {
    let LayeredRecipe { recipe, origins } = Recipe::resolve(args, families, default_recipe)?;
    if args.print_recipe {
        // Before it is checked, as this shows what is wrong.
        let text = toml::to_string(&recipe.complete())?;
        print!("{}", origins.annotate(&text)?);
    }
    let plan = recipe.plan()?;
    fp8::check_flags(&recipe, &args.fp8)?;
    args.saving.check(&recipe.checkpoint)?;
    save_hf::check(&recipe, &args.saving)?;
    lora::check(&recipe)?;
    determinism::check(&recipe)?;
    if args.print_recipe {
        return Ok(ExitCode::SUCCESS);
    }
    let ranks = ranks::set_up(&args.ranks, args.device, plan.mesh.world_size())?;
    let (own_rank, local_rank) = (ranks.own_rank, ranks.local_rank);
    let wanted = plan.mesh.world_size();
    check_cuda_graph(&recipe, args.device, wanted, ranks.engine)?;
    let deterministic = determinism::pin(&recipe, ranks.engine);
    let on_this_machine = ranks.on_this_machine;
    let mut world = ranks.world.clone().nccl(recipe.nccl.clone());
    let faults = Faults::new(args.inject.clone());
    faults.check(wanted)?;
    let steps = recipe.train.steps as u64;
    faults.check_steps(1..steps + 1)?;
    if own_rank.is_none() {
        check_can_start(&args.inject)?;
    }
    if let Some(threads) = args.compute_threads {
        if args.device != DeviceKind::Cpu {
            let device = args.device;
            return Err(format!(
                "--compute-threads applies to --device cpu, not {device}; remove it"
            )
            .into());
        }
        world = world.compute_threads(threads);
    }
    world.check()?;
    // The devices are queried once, here, so that errors are reported before anything starts.
    let devices = args.device.devices()?;
    check_types(&recipe, args.device, |dtype| {
        devices[0].supports_dtype(dtype)
    })?;
    let computing = recipe.data_parallel.precision.of(DType::F32);
    recipe
        .model
        .check_kernels(&recipe.kernels, &devices[0], computing)?;
    recipe.kernels.check_epilogues(&devices[0], computing)?;
    memory::check_model(&recipe, &devices[0])?;
    let estimates = RankEstimates::new(&recipe, &plan, &devices[0])?;
    let checked = check_memory(args, &recipe, (&plan.mesh, &ranks), &estimates);
    let (planned_memory, unfit) = checked?;
    let memory = (&estimates, &planned_memory);
    let data = data::open(&recipe)?;
    let tokenizer = data::sample_tokenizer(&recipe)?;
    let sample = data::sample(&recipe, &*data, tokenizer.as_ref())?;
    let resumes = args.saving.resume.is_some();
    let load = lora::initial_weights(&recipe, resumes);
    let weights = load.map(|path| InitialWeights::new(path, &recipe, &args.saving, families));
    if let Some(weights) = weights
        .as_ref()
        .filter(|_| !resumes || recipe.lora.is_some())
    {
        weights.open()?;
    }
    let has_first = own_rank.is_none_or(|rank| rank == 0);
    if has_first {
        gemm_algorithms::check(&recipe, &devices[0])?;
    }
    if args.dry_run {
        if has_first {
            let engine = ranks.engine.to_string();
            let engine = (&engine[..], args.compute_threads);
            print_run(&recipe, &plan, &*data, args.device, engine);
            determinism::print_header(&recipe, deterministic.as_ref());
            print_training(&recipe, memory, None, &devices[0]);
            println!("{}", planned_memory.table());
            unfit.map_or(Ok(()), Err)?;
            StartResolver::new(args, &recipe, &*data)?.check()?;
            println!("dry run: the run can start; nothing was allocated or written");
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(rank) = own_rank.filter(|rank| faults.never_starts(*rank)) {
        return never_start(rank, args);
    }
    let deadline = seconds("timeout", args.ranks.deadline)?;
    let first_deadline = seconds("first-timeout", args.ranks.first_deadline)?;
    let interrupt = interrupt(seconds("grace", args.grace)?)?;
    let resolver = has_first.then(|| StartResolver::new(args, &recipe, &*data));
    let resolver = resolver.transpose()?;
    match (&resolver, own_rank) {
        // Reading a checkpoint may take long: it is done after the rendezvous, while the other ranks wait.
        (Some(resolver), Some(_)) => resolver.check()?,
        (Some(resolver), None) => match resolver.decision()? {
            StartDecision::Finished(over) => {
                println!("{over}");
                return Ok(ExitCode::SUCCESS);
            }
            StartDecision::Train(start) => {
                let first = start.from.as_ref().map_or(0, |from| from.step);
                faults.check_steps(first + 1..steps + 1)?;
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
            estimates: &estimates,
            planned_memory: &planned_memory,
            data: &*data,
            resolver: resolver.as_ref().filter(|_| rank.rank() == 0),
            saving: &args.saving,
            weights: weights.as_ref(),
            sample: &sample,
            tokenizer: tokenizer.as_ref(),
            faults: &args.inject,
            deadline,
            heartbeat_interval: MAX_HEARTBEAT_INTERVAL.min(deadline.min(first_deadline) / 4),
            device: args.device,
            deterministic: deterministic.as_ref(),
            fp8_report: args.fp8.fp8_report,
            place: own_rank.map(|_| LocalRank {
                rank: local_rank,
                world_size: on_this_machine,
            }),
        };
        let device = &devices[place % devices.len()];
        run.train(&rank, device, &interrupt)
    });
    if let (Err(_), Some(resolver)) = (&results, &resolver) {
        resolver.remove_unused();
    }
    let result = results?.swap_remove(0);
    let decision = resolver.as_ref().map(StartResolver::decision).transpose()?;
    match (decision, result) {
        (Some(StartDecision::Train(start)), Some(result)) => {
            let unfired_faults = result.unfired_faults.join(", ");
            let is_wrong = !result.outcome.stopped && !unfired_faults.is_empty();
            let unit = data::unit(&*data);
            let code = finish(
                args,
                (&recipe, &sample),
                unit,
                &planned_memory,
                &start.folder,
                result,
            )?;
            if is_wrong {
                return Err(
                    format!("{unfired_faults} did not fire: the rank made no such call").into(),
                );
            }
            Ok(code)
        }
        (Some(StartDecision::Finished(over)), _) => {
            println!("{over}");
            Ok(ExitCode::SUCCESS)
        }
        // Rank 0 is another process, which prints the results.
        (_, Some(result)) if result.outcome.stopped => Ok(ExitCode::from(interrupt::EXIT_CODE)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Writes the plots and the sample, and prints the closing lines.
fn finish(
    args: &PretrainArgs,
    (recipe, sample_config): (&Recipe, &GenerateConfig),
    unit: LossUnit,
    planned_memory: &PlannedMemory,
    folder: &RunFolder,
    result: RankResult,
) -> Result<ExitCode, Error> {
    let RankResult {
        outcome, sample, ..
    } = &result;
    let is_pipeline = recipe.parallel.pipeline > 1;
    trace::write(folder, result.ranks, is_pipeline, &result.events)?;
    let records = read_metrics(&folder.metrics())?;
    let model = format!("{}: {}", recipe.model.family(), recipe.model.describe());
    let mut title = format!("{model}; {}", header::layout(recipe));
    if let Some(name) = recipe.data.name() {
        title += &format!("; {name}");
    }
    let curve = LossCurve::from_records(title, &records);
    curve.write_svg(&folder.loss_svg())?;
    println!("{}", curve.terminal(terminal::columns()));
    show_experts(&records, folder)?;
    if let Some(sample) = sample {
        replace_file(&folder.sample(), sample.as_bytes())?;
        println!("sample after {:?}:\n{sample}\n", sample_config.prompt);
    }
    report::write(folder, &result.fp8)?;
    print_memory(&result.memory);
    planned_memory.write_svg(&folder.memory_svg())?;
    header::print("planned", planned_memory.to_string());
    if let Some(cost) = &outcome.replay_cost {
        header::print("check", cost.to_string());
    }
    if let Some(graphs) = &outcome.cuda_graphs {
        header::print("graphs", graphs.to_string());
    }
    if let Some(engine) = &result.engine {
        header::print("engine", engine);
    }
    println!();
    let held_out = outcome.held_out;
    let parallel = &recipe.parallel;
    let per_document = parallel.context_split == ContextSplit::ZigzagPerDocument;
    if parallel.context > 1 && per_document || parallel.hybrid_context_parallel {
        let Padding { added, all } = outcome.padding;
        let share = 100.0 * added as f64 / all.max(1) as f64;
        println!(
            "padding of documents, each of which is split: {} of {}, {share:.1} %",
            grouped(added as usize),
            count(all as usize, "token")
        );
    }
    println!("{}", describe_held_out(&held_out, unit, outcome.steps));
    println!("written to {}", folder.path().display());
    let loss_scale = recipe.train_config().loss_scale();
    let is_dynamic = matches!(loss_scale, LossScale::Dynamic(_));
    if outcome.without_targets > 0 {
        println!(
            "{} of {} were skipped, as all of their targets are masked",
            outcome.without_targets,
            count(outcome.steps, "step"),
        );
    }
    if outcome.spikes > 0 {
        println!(
            "{} of {} were skipped, as a loss or gradient norm was a spike",
            outcome.spikes,
            count(outcome.steps, "step"),
        );
    }
    let not_finite = outcome.skipped - outcome.without_targets - outcome.spikes;
    if not_finite > 0 {
        let helps = if is_dynamic {
            "expected with a dynamic loss scale"
        } else {
            "try a lower --lr"
        };
        println!(
            "{not_finite} of {} were skipped, as a loss or a gradient was not finite: {helps}",
            count(outcome.steps, "step"),
        );
    }
    if loss_scale != LossScale::None {
        println!("loss scale {} at the end", result.loss_scale);
    }
    if outcome.stopped {
        println!(
            "interrupted after {} of {}",
            outcome.steps,
            count(recipe.train.steps, "step")
        );
        if recipe.checkpoint.save {
            let device = match args.device {
                DeviceKind::Cpu => String::new(),
                device => format!(" --device {device}"),
            };
            let folder = folder.path().display();
            println!("resume with pretrain --resume {folder}{device}");
        }
    }
    println!("{}", describe_weights(recipe, folder)?);
    if outcome.stopped {
        return Ok(ExitCode::from(interrupt::EXIT_CODE));
    }
    check_outcome(outcome)
}

/// Prints and draws the load of the experts, if the model has any.
fn show_experts(records: &[MetricsRecord], folder: &RunFolder) -> Result<(), Error> {
    let summary = records.iter().rev().find_map(|record| match record {
        MetricsRecord::Experts(summary) => Some(summary),
        _ => None,
    });
    if let Some(summary) = summary {
        let step = summary.step;
        println!("experts in step {step}; load as a multiple of the even share\n");
        println!("{}\n", summary.table().fit(terminal::width()));
    }
    if let Some(map) = ExpertHeatMap::from_records(records) {
        map.write_svg(&folder.experts_svg())?;
        println!("{}", map.terminal(terminal::columns()));
    }
    Ok(())
}

/// Fails if the run diverged or every step was skipped.
fn check_outcome(outcome: &TrainOutcome) -> Result<ExitCode, Error> {
    let (step, what) = match outcome.diverged {
        Some(step) => (step, "no loss is finite from there on"),
        None => (outcome.steps, "the held-out loss is not finite"),
    };
    if let Some(verdict) = outcome.bad_loss.filter(|_| outcome.has_diverged()) {
        let message = format!("{what}; it is the same on another data-parallel rank");
        return Err(ReplayError {
            step,
            verdict,
            message,
        }
        .into());
    }
    if outcome.has_diverged() {
        return Err(format!(
            "training diverged at step {step}: {what}; lower --lr, or lengthen the warm-up"
        )
        .into());
    }
    if outcome.skipped == outcome.steps {
        Err("every step was skipped: the weights were never updated".into())
    } else {
        Ok(ExitCode::SUCCESS)
    }
}

/// The last held-out loss, and the other terms of the objective.
fn describe_held_out(held_out: &HeldOutMetrics, unit: LossUnit, steps: usize) -> String {
    if held_out.tokens == 0 {
        return "held-out loss: none, as all held-out targets are masked".into();
    }
    let loss = unit.show(held_out.loss, held_out.bits_per_byte);
    let (steps, tokens) = (
        count(steps, "step"),
        count(held_out.tokens as usize, "token"),
    );
    let mut text = format!("held-out loss {loss} after {steps}, on {tokens}");
    if let Some(objective) = held_out.minimised.objective {
        text += &format!("\nobjective {objective:.4} there: the loss");
        for (name, term) in held_out.minimised.terms() {
            text += &format!(" + {name} {term:.4}");
        }
    }
    text
}

/// The last line: where the weights are.
fn describe_weights(recipe: &Recipe, folder: &RunFolder) -> Result<String, Error> {
    if !recipe.checkpoint.save {
        return Ok("the weights were not saved (--no-save)".into());
    }
    let latest = Checkpoint::open(folder.checkpoints())?;
    Ok(format!("the weights are in {}", latest.path().display()))
}

/// Prints the estimated and the measured memory of rank 0.
fn print_memory(memory: &RankMemory) {
    println!("memory of rank 0, without activations; measured: the peak of each kind\n");
    println!("{}\n", memory.planned.table(Some(&memory.peak)));
    let inputs = &memory.inputs;
    if inputs.host_peak > 0 {
        println!(
            "inputs of recomputed blocks: at most {} on the host and {} on the device; {} copied to the host\n",
            format_bytes(inputs.host_peak),
            format_bytes(inputs.device_peak),
            format_bytes(inputs.traffic.up),
        );
    }
    if let Some(blocks) = memory.peak_unsharded_units {
        println!("most blocks gathered at once: {blocks}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::DEFAULT_RECIPE;
    use burn_megatron::data_parallel::{Moments, Precision};
    use burn_megatron::train::metrics::Minimised;

    use crate::flags::parse_text;

    /// The flags as they are typed.
    fn pretrain(flags: &str) -> Result<ExitCode, Error> {
        let families = Families::transformers();
        run(&parse_text(flags)?, &families, DEFAULT_RECIPE)
    }

    #[test]
    fn a_fault_strikes_at_the_step_of_the_run() {
        let runs = std::env::temp_dir().join(format!("faults-of-a-run-{}", std::process::id()));
        let flags = format!(
            "--tp 2 --dp 1 --pp 1 --steps 3 --timeout 20 --runs-dir {} --inject error@rank=1,step=2,call=2",
            runs.display()
        );
        let error = pretrain(&flags).unwrap_err().to_string();
        std::fs::remove_dir_all(&runs).unwrap();
        let wanted = "error@rank=1,step=2,call=2 triggers on rank 1, step 2, call 2";
        assert!(error.contains(wanted), "{error}");
        for (flags, wanted) in [
            (
                "--steps 3 --inject nan@rank=0,step=4,call=0",
                "invalid fault nan@rank=0,step=4,call=0: step 4 is not in this run; expected steps 1 to 3",
            ),
            (
                "--inject never-starts@rank=1",
                "never-starts@rank=1 applies to ranks that are processes, and all ranks are threads of this \
                 one; start processes with `burn-megatron launch` or mpirun",
            ),
        ] {
            assert_eq!(pretrain(flags).unwrap_err().to_string(), wanted);
        }
        let error = pretrain("--tp 2 --inject kill@rank=8,call=0").unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid fault kill@rank=8,call=0: the world has 8 ranks; expected rank 0 to 7"
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
        assert_eq!(describe_held_out(&held_out, LossUnit::Byte, 3), plain);
        held_out.minimised = Minimised {
            further_tokens: None,
            objective: Some(1.75),
            label_smoothing: Some(0.125),
            z_loss: Some(0.125),
        };
        assert_eq!(
            describe_held_out(&held_out, LossUnit::Byte, 3),
            format!(
                "{plain}\nobjective 1.7500 there: the loss + label smoothing 0.1250 + z-loss 0.1250"
            )
        );
        (held_out.tokens, held_out.loss) = (0, f64::NAN);
        let none = "held-out loss: none, as all held-out targets are masked";
        assert_eq!(describe_held_out(&held_out, LossUnit::Byte, 3), none);
    }

    #[test]
    fn a_type_that_the_device_lacks_is_refused_before_the_start() {
        let mut recipe = Recipe::default();
        let check = |recipe: &Recipe| check_types(recipe, DeviceKind::Wgpu, |x| x != DType::BF16);
        assert!(check(&recipe).is_ok());
        recipe.data_parallel.moments = Moments::Bf16;
        assert_eq!(
            check(&recipe).unwrap_err().to_string(),
            "invalid moments = bf16 for --device wgpu: expected f32 or f16"
        );
        recipe.data_parallel.precision = Precision::Bf16;
        let error = check(&recipe).unwrap_err().to_string();
        assert!(
            error.starts_with("invalid precision = bf16 for --device wgpu"),
            "{error}"
        );
        recipe.data_parallel.precision = Precision::F64;
        assert_eq!(
            check(&recipe).unwrap_err().to_string(),
            "invalid precision = f64 for --device wgpu: expected f32 or f16"
        );
        let devices = DeviceKind::Cpu.devices().unwrap();
        check_types(&recipe, DeviceKind::Cpu, |x| devices[0].supports_dtype(x)).unwrap();
    }
}
