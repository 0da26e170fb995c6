//! Implements `burn-megatron pretrain`.

pub mod args;
mod checks;
mod finish;
#[cfg(test)]
mod measured;
pub mod resolve;
#[cfg(test)]
mod twins;

use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::DType;
use burn_megatron::device::{DeviceKind, check_results};
use burn_megatron_comm_testing::fault_injection::FaultPlan as Faults;

use crate::banner::print_run;
use crate::data;
use crate::engines::require_fast;
use crate::error::Error;
use crate::estimate::{self, RankEstimates};
use crate::family::Families;
use crate::fp8;
use crate::header::Header;
use crate::interrupt::{self, Interrupt};
use crate::nodes::LocalRank;
use crate::rank_run::{RankRun, print_training};
use crate::ranks::{self, seconds};
use crate::recipe::Recipe;
use crate::recipe::merge::LayeredRecipe;
use crate::resume::{StartDecision, StartResolver};
use crate::resume_mode::ResumeMode;
use crate::slow_progress::phase;
use crate::weights::InitialWeights;
use crate::{cpus, determinism, gemm_algorithms, lora, memory, save_hf};
use args::PretrainArgs;
use checks::{check_can_start, check_cuda_graph, check_memory, check_types, never_start};
use finish::finish;

/// The maximum interval at which rank 0 signals the other ranks while it looks for a checkpoint.
const MAX_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// Trains, and prints the results. Signals to this process stop the run.
pub fn run(
    args: &PretrainArgs,
    families: &Families,
    default_recipe: &str,
) -> Result<ExitCode, Error> {
    run_until(args, families, default_recipe, Interrupt::listen)
}

/// Trains with a custom handler for stopping the run, because a process can install a signal handler only once.
fn run_until(
    args: &PretrainArgs,
    families: &Families,
    default_recipe: &str,
    interrupt: impl FnOnce(Duration) -> Result<Interrupt, ctrlc::Error>,
) -> Result<ExitCode, Error> {
    let LayeredRecipe {
        recipe,
        origins,
        dropped,
    } = Recipe::resolve(args, families, default_recipe)?;
    let note_dropped = || dropped.iter().for_each(|note| eprintln!("note: {note}"));
    if args.print_recipe {
        note_dropped();
        // Print the recipe before it is checked, so that the user can see what is wrong.
        let text = toml::to_string(&recipe.complete())?;
        print!("{}", origins.annotate(&text)?);
    }
    let plan = recipe.plan()?;
    fp8::check_flags(&recipe, args.fp8_report, &args.settings)?;
    args.saving.check(&recipe.checkpoint)?;
    save_hf::check(&recipe, &args.saving)?;
    lora::check(&recipe)?;
    determinism::check(&recipe)?;
    if args.print_recipe {
        return Ok(ExitCode::SUCCESS);
    }
    let ranks = ranks::set_up(
        &args.ranks,
        &args.settings,
        args.device,
        plan.mesh.world_size(),
    )?;
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
                "--compute-threads requires --device cpu, got {device}: remove it"
            )
            .into());
        }
        world = world.compute_threads(threads);
    }
    world.check()?;
    cpus::warn_if_few(args.device, &ranks);
    // Query the devices once, before anything starts, so that errors are reported early.
    let devices = args.device.devices()?;
    // Use the device of this process. A context on another device would use memory of that device.
    let device = &devices[own_rank.map_or(0, |_| local_rank) % devices.len()];
    check_results(device)?;
    check_types(&recipe, args.device, |dtype| device.supports_dtype(dtype))?;
    let computing = recipe.data_parallel.precision.of(DType::F32);
    recipe
        .model
        .check_kernels(&recipe.kernels, device, computing)?;
    recipe.kernels.check_epilogues(device, computing)?;
    memory::check_model(&recipe, device)?;
    estimate::check_names(&recipe, device)?;
    let estimates = phase("planning the memory", || {
        RankEstimates::new(&recipe, &plan, device)
    })?;
    if args.require_fast_kernels {
        require_fast(args.device, device, &estimates.first().kernels)?;
    }
    let checked = check_memory(args, &recipe, (&plan.mesh, &ranks), &estimates);
    let (planned_memory, unfit) = checked?;
    let memory = (&estimates, &planned_memory);
    let data = phase("reading the data", || data::open(&recipe))?;
    let tokenizer = data::sample_tokenizer(&recipe)?;
    let sample = data::sample(&recipe, &*data, tokenizer.as_ref())?;
    let weights = InitialWeights::new(&recipe, &args.saving, families);
    // Fail early if the weights cannot be read. It is not known yet whether a resumed run has a checkpoint.
    weights.open(ResumeMode::of(args)? != ResumeMode::Fresh)?;
    let has_first = own_rank.is_none_or(|rank| rank == 0);
    if has_first {
        note_dropped();
        gemm_algorithms::check(&recipe, device)?;
    }
    if args.dry_run {
        if has_first {
            let engine = ranks.engine.to_string();
            let engine = (&engine[..], args.compute_threads);
            let mut header = Header::new(args.verbose);
            print_run(&mut header, &recipe, &plan, &*data, args.device, engine);
            determinism::print_header(&mut header, &recipe, deterministic.as_ref());
            print_training(&mut header, &recipe, memory, (args.device, device));
            println!("\n{}", planned_memory.table());
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
        // Reading a checkpoint may take long. It is read after the rendezvous, while the other ranks wait.
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
            weights: &weights,
            sample: &sample,
            tokenizer: tokenizer.as_ref(),
            faults: &args.inject,
            deadline,
            heartbeat_interval: MAX_HEARTBEAT_INTERVAL.min(deadline.min(first_deadline) / 4),
            device: args.device,
            deterministic: deterministic.as_ref(),
            fp8_report: args.fp8_report,
            verbose: args.verbose,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::DEFAULT_RECIPE;
    use burn_megatron::data_parallel::{Moments, Precision};
    use insta::assert_snapshot;

    use crate::flags::parse_text;

    /// Runs `pretrain` with these flags.
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
                "never-starts@rank=1 requires ranks that are processes, and all ranks are threads of this process; \
                 start processes with `burn-megatron launch` or mpirun",
            ),
        ] {
            assert_eq!(pretrain(flags).unwrap_err().to_string(), wanted);
        }
        let error = pretrain("--tp 2 --inject kill@rank=8,call=0").unwrap_err();
        assert_snapshot!(
            error,
            @"invalid fault kill@rank=8,call=0: the world has 8 ranks; expected rank 0 to 7"
        );
    }

    #[test]
    fn a_type_that_the_device_lacks_is_refused_before_the_start() {
        let mut recipe = Recipe::default();
        let check = |recipe: &Recipe| check_types(recipe, DeviceKind::Wgpu, |x| x != DType::BF16);
        assert!(check(&recipe).is_ok());
        recipe.data_parallel.moments = Moments::Bf16;
        assert_snapshot!(
            check(&recipe).unwrap_err(),
            @"invalid moments = bf16 for --device wgpu: expected f32 or f16"
        );
        recipe.data_parallel.precision = Precision::Bf16;
        let error = check(&recipe).unwrap_err().to_string();
        assert!(
            error.starts_with("invalid precision = bf16 for --device wgpu"),
            "{error}"
        );
        recipe.data_parallel.precision = Precision::F64;
        assert_snapshot!(
            check(&recipe).unwrap_err(),
            @"invalid precision = f64 for --device wgpu: expected f32 or f16"
        );
        let devices = DeviceKind::Cpu.devices().unwrap();
        check_types(&recipe, DeviceKind::Cpu, |x| devices[0].supports_dtype(x)).unwrap();
    }
}
