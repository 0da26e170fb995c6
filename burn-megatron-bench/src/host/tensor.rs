//! The host time of a tensor-parallel collective.

use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{Call, Engine, Rank, ReduceOp, World};
use burn_megatron_comm_testing::join_as_threads;

use super::HostBenchArgs;
use burn_megatron_cli::internal::Error;

/// Times all-reduces of two ranks over NCCL, in seconds. Each rank is a thread of this process with its own GPU.
pub fn all_reduces(
    args: &HostBenchArgs,
    elements: usize,
    devices: &[Device],
) -> Result<Vec<f64>, Error> {
    let [first, second, ..] = devices else {
        return Err("--only tensor requires two CUDA devices; use --only model,fp8".into());
    };
    let devices = [first, second];
    let ranks = join_as_threads(devices.len(), |launch| {
        let world = World::processes(launch).engine(Engine::Nccl);
        world.run(|rank| time(args, elements, &rank, devices[rank.rank()]))
    });
    let ranks: Result<Vec<Vec<Vec<f64>>>, _> = ranks.into_iter().collect();
    // Each world returns the result of its own rank. The collective of a step ends with the slower rank.
    let ranks = ranks?.concat();
    let slower = |step: usize| {
        ranks
            .iter()
            .map(|seconds| seconds[step])
            .fold(0.0, f64::max)
    };
    Ok((0..args.repeats).map(slower).collect())
}

fn time(
    args: &HostBenchArgs,
    elements: usize,
    rank: &Rank,
    device: &Device,
) -> Result<Vec<f64>, Error> {
    let comm = rank.communicator();
    let on_device = comm.on_device().filter(|comm| comm.takes(device));
    let on_device = on_device.ok_or("--only tensor requires the NCCL engine")?;
    let x = Tensor::<1>::zeros([elements], (device, DType::BF16));
    let mut seconds = Vec::with_capacity(args.repeats);
    for step in 0..args.warm_up + args.repeats {
        let start = Instant::now();
        let mut pending = on_device.start(vec![(Call::AllReduce(ReduceOp::Sum), x.clone())])?;
        drop(pending.remove(0).wait()?);
        if step >= args.warm_up {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    device.sync()?;
    Ok(seconds)
}
