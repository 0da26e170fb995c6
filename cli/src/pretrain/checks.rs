//! What is checked before the ranks start.

use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use burn::tensor::DType;
use burn_megatron::comm::testing::fault_injection::{Fault, FaultKind};
use burn_megatron::data_parallel::Moments;
use burn_megatron::device::DeviceKind;
use burn_megatron::mesh::Mesh;

use super::args::PretrainArgs;
use crate::error::Error;
use crate::estimate::RankEstimates;
use crate::memory_limit::PlannedMemory;
use crate::ranks::{RankSetup, seconds};
use crate::recipe::Recipe;

/// Plans the memory of the run, and checks that it fits. With `--dry-run` that it does not is returned beside the plan.
///
/// # Errors
/// What is needed, and which changes of the recipe would fit.
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
    // The lower bound is checked before anything is planned, which takes longer.
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

/// Checks that no fault keeps a thread from starting: only processes can be missing.
pub fn check_can_start(faults: &[Fault]) -> Result<(), Error> {
    let never = |fault: &&Fault| fault.kind == FaultKind::NeverStarts;
    match faults.iter().find(never) {
        None => Ok(()),
        Some(fault) => Err(format!(
            "{fault} applies to ranks that are processes, and all ranks are threads of this one; start \
             processes with `burn-megatron launch` or mpirun"
        )
        .into()),
    }
}

/// A rank with the fault never-starts: waits until the others have timed out.
pub fn never_start(rank: usize, args: &PretrainArgs) -> Result<ExitCode, Error> {
    sleep(seconds("first-timeout", args.ranks.first_deadline)? + Duration::from_secs(60));
    Err(format!("rank {rank} never starts (injected fault)").into())
}

/// Checks that a device supports the types of the run; `has` tells which it supports.
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
    // Some GPUs have f64, at a small fraction of their speed.
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
