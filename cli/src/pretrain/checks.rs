//! Checks before the ranks start.

use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use burn::tensor::DType;
use burn_megatron::comm::Engine;
use burn_megatron::data_parallel::Moments;
use burn_megatron::device::DeviceKind;
use burn_megatron::mesh::Mesh;
use burn_megatron_comm_testing::fault_injection::{Fault, FaultKind};

use super::args::PretrainArgs;
use crate::error::Error;
use crate::estimate::RankEstimates;
use crate::memory_limit::PlannedMemory;
use crate::ranks::{RankSetup, seconds};
use crate::recipe::Recipe;

/// Plans the memory of the run, and checks that it fits. With `--dry-run`, an error is returned together with the
/// plan.
///
/// # Errors
/// Returns the required memory, and the changes of the recipe that would fit.
pub fn check_memory(
    args: &PretrainArgs,
    recipe: &Recipe,
    (mesh, ranks): (&Mesh, &RankSetup),
    estimates: &RankEstimates,
) -> Result<(PlannedMemory, Option<Error>), Error> {
    let report = |checked: Result<(), Error>| match checked {
        Err(error) if args.dry_run => Ok(Some(error)),
        checked => checked.map(|()| None),
    };
    // Check the lower bound first, because planning takes longer.
    let bound = if args.ignore_memory {
        None
    } else {
        report(estimates.check(mesh, ranks, args.device))?
    };
    let planned = PlannedMemory::new(recipe);
    let unfit = if args.memory_limit.is_some() || !args.ignore_memory {
        report(planned.check(recipe, args.memory_limit, ranks, args.device))?
    } else {
        None
    };
    Ok((planned, unfit.or(bound)))
}

/// Checks that no fault prevents a thread from starting. Only ranks that are processes can be missing.
pub fn check_can_start(faults: &[Fault]) -> Result<(), Error> {
    let never = |fault: &&Fault| fault.kind == FaultKind::NeverStarts;
    match faults.iter().find(never) {
        None => Ok(()),
        Some(fault) => Err(format!(
            "{fault} requires ranks that are processes, and all ranks are threads of this process; start processes \
             with `burn-megatron launch` or mpirun"
        )
        .into()),
    }
}

/// Runs a rank with the fault never-starts: waits until the other ranks have timed out.
pub fn never_start(rank: usize, args: &PretrainArgs) -> Result<ExitCode, Error> {
    sleep(seconds("first-timeout", args.ranks.first_deadline)? + Duration::from_secs(60));
    Err(format!("rank {rank} never starts (injected fault)").into())
}

/// Checks that the device and the engine of the ranks support CUDA graphs, if the run uses them.
pub fn check_cuda_graph(
    recipe: &Recipe,
    kind: DeviceKind,
    ranks: usize,
    engine: Engine,
) -> Result<(), Error> {
    if !recipe.train.cuda_graph {
        return Ok(());
    }
    if kind != DeviceKind::Cuda {
        return Err(format!(
            "cuda_graph requires --device cuda, and this run is on {kind}; remove it (--train.cuda_graph=false)"
        )
        .into());
    }
    if ranks > 1 && engine != Engine::Nccl {
        return Err(format!(
            "cuda_graph with {ranks} ranks requires one process per rank and NCCL, and the engine is {engine}; start \
             the ranks with `burn-megatron launch`, or remove it (--train.cuda_graph=false)"
        )
        .into());
    }
    Ok(())
}

/// Checks that a device supports the types of the run. `has` returns whether the device supports a type.
pub fn check_types(
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
    // Some GPUs support f64, but at a small fraction of their speed.
    let has = |dtype: DType| has(dtype) && (dtype != DType::F64 || kind == DeviceKind::Cpu);
    for (key, dtype) in [
        ("precision", config.precision.of(DType::F32)),
        ("moments", moments),
    ] {
        if !has(dtype) {
            let types = [DType::F32, DType::BF16, DType::F16].into_iter();
            let fits: Vec<_> = types.filter(|dtype| has(*dtype)).map(name).collect();
            return Err(format!(
                "invalid {key} = {} for --device {kind}: expected {}",
                name(dtype),
                fits.join(" or "),
            )
            .into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Families;
    use crate::flags::parse_text;
    use crate::recipe::DEFAULT_RECIPE;

    fn recipe(flags: &str) -> Recipe {
        let args = parse_text(flags).unwrap();
        let families = Families::transformers();
        let resolved = Recipe::resolve(&args, &families, DEFAULT_RECIPE);
        resolved.unwrap().recipe
    }

    #[test]
    fn graphs_are_for_cuda_and_for_ranks_with_a_process_each() {
        let checked = |flags: &str, kind, ranks, engine| {
            let checked = check_cuda_graph(&recipe(flags), kind, ranks, engine);
            checked.map_or_else(|error| error.to_string(), |()| "accepted".into())
        };
        let on = "--train.cuda_graph --tp 1 --pp 1 --dp 1";
        for (kind, ranks, engine, text) in [
            (DeviceKind::Cuda, 1, Engine::Threads, "accepted"),
            (DeviceKind::Cuda, 2, Engine::Nccl, "accepted"),
            (DeviceKind::Cpu, 1, Engine::Threads, "this run is on cpu"),
            (DeviceKind::Cuda, 2, Engine::Mpi, "and the engine is mpi"),
        ] {
            let found = checked(on, kind, ranks, engine);
            assert!(found.contains(text), "{found}");
        }
        assert_eq!(checked("", DeviceKind::Cpu, 2, Engine::Mpi), "accepted");
    }
}
