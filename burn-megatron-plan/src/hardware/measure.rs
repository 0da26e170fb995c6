//! Measures the hardware constants of this machine with a short benchmark, for runs whose ranks are threads.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use burn::tensor::{Distribution, Tensor};
use burn_megatron_kernels::attention::{AttentionOptions, flash_attention};

use super::{AttentionShare, Hardware, Link};
use burn_megatron::comm::{Buffer, CommError, Communicator, Rank, ReduceOp, World, WorldError};
use burn_megatron::data_parallel::host_memory::HostMemory;

/// An error of [`measure`].
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The ranks could not be started, or they failed.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The memory size of this machine could not be read.
    #[error("the memory of this machine is unknown: /proc/meminfo has no MemTotal")]
    NoMemory,
}

/// The sizes of the square matrix multiplications that are timed.
const SIZES: [usize; 7] = [16, 32, 64, 128, 256, 512, 1024];

/// The duration for which each operation is repeated in a round.
const REPEAT: Duration = Duration::from_millis(60);

/// The number of rounds of each operation.
const ROUNDS: usize = 3;

/// The number of elements of the tensor with which the memory bandwidth is measured. Models that are trained on a CPU
/// have tensors of about this size, and their memory is reused.
const STREAMED: usize = 1 << 18;

/// The numbers of elements of a small and a large buffer for all-reduces.
const BUFFERS: [usize; 2] = [256, 1 << 20];

/// The measurements of a rank, or the means of the measurements over all ranks.
#[derive(Clone, Debug, Default)]
struct Rates {
    /// FLOP/s of matrix multiplications, in the order of [`SIZES`].
    products: Vec<f64>,
    /// Memory bandwidth, in bytes per second.
    bandwidth: f64,
    /// Overhead of an operation in seconds, measured with few elements, for one pass.
    operation: f64,
    /// FLOP/s of attention, in the forward and the backward.
    attention: [f64; 2],
    /// The time of an all-reduce over all ranks in seconds, for each buffer size in [`BUFFERS`].
    sums: [f64; 2],
}

/// Measures the hardware constants of this machine for `ranks` ranks that run as threads, with one compute thread per
/// rank, in f32. The benchmark takes a few seconds. It measures matrix multiplications of several sizes, memory
/// bandwidth, attention, and all-reduces over the ranks.
///
/// Because the ranks share the machine, all ranks run the benchmark at the same time. The memory of each rank is an
/// equal share of the memory of the machine.
///
/// # Errors
///
/// [`MeasureError`] if the ranks cannot be started or fail, or if the memory size of the machine cannot be read.
pub fn measure(ranks: usize) -> Result<Hardware, MeasureError> {
    let host = HostMemory::read();
    let limits = [host.machine, host.cgroup].into_iter().flatten();
    let memory = limits.map(|limit| limit.bytes).min();
    let memory = memory.ok_or(MeasureError::NoMemory)?;
    let world = World::threads(ranks)?.compute_threads(1);
    let measured = world.run(|rank| probe(&rank))?;
    let mean = |rate: &dyn Fn(&Rates) -> f64| {
        measured.iter().map(rate).sum::<f64>() / measured.len() as f64
    };
    let products: Vec<_> = (0..SIZES.len())
        .map(|i| mean(&|rates| rates.products[i]))
        .collect();
    let peak = products.iter().copied().fold(0.0, f64::max);
    let curve = SIZES.iter().zip(&products);
    let curve = curve.map(|(size, rate)| (*size as f64, rate / peak));
    let share = |i: usize| (mean(&|rates| rates.attention[i]) / peak).min(1.0);
    let seconds = [0, 1].map(|i| mean(&|rates| rates.sums[i]));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Hardware {
        name: format!("CPU, {ranks} ranks"),
        memory: memory / ranks as u64,
        cores: (ranks >= cores).then_some(cores),
        bandwidth: mean(&|rates| rates.bandwidth),
        operation: mean(&|rates| rates.operation),
        peak: BTreeMap::from([("f32".into(), peak)]),
        products: BTreeMap::from([("default".into(), curve.collect())]),
        attention: AttentionShare {
            forward: share(0),
            backward: share(1),
        },
        host: None,
        links: vec![link(ranks, seconds)],
    })
}

/// Returns the bandwidth and the latency for which ring all-reduces of the two buffers take the measured times. A ring
/// of `n` ranks has `2 (n - 1)` steps, which together send `2 (n - 1) / n` of the buffer. A single rank sends nothing,
/// so its link is computed as for two ranks.
fn link(ranks: usize, [small, large]: [f64; 2]) -> Link {
    let steps = 2.0 * (ranks.max(2) - 1) as f64;
    let bytes = BUFFERS.map(|elements| 4.0 * elements as f64 * steps / ranks.max(2) as f64);
    let seconds_per_byte = ((large - small) / (bytes[1] - bytes[0])).max(1e-13);
    Link {
        name: "memory".into(),
        devices: None,
        bandwidth: 1.0 / seconds_per_byte,
        latency: ((small - bytes[0] * seconds_per_byte) / steps).max(1e-9),
    }
}

/// Runs the benchmark on one rank while all other ranks do the same.
fn probe(rank: &Rank) -> Result<Rates, CommError> {
    let (device, world) = (burn::tensor::Device::flex(), rank.communicator());
    let random = |dims: [usize; 2]| Tensor::<2>::random(dims, Distribution::Default, &device);
    let mut products = vec![];
    for size in SIZES {
        let (a, b) = (random([size, size]), random([size, size]));
        let seconds = repeat(&*world, || drop(a.clone().matmul(b.clone())))?;
        products.push(2.0 * (size as f64).powi(3) / seconds);
    }
    let x = random([1, STREAMED]);
    let seconds = repeat(&*world, || drop(x.clone().mul_scalar(1.5)))?;
    let bandwidth = 2.0 * 4.0 * STREAMED as f64 / seconds;
    let operation = probe_operation(&*world)?;
    let attention = probe_attention(&*world)?;
    let mut sums = [0.0; 2];
    for (seconds, elements) in sums.iter_mut().zip(BUFFERS) {
        let mut failed = None;
        *seconds = repeat(&*world, || {
            let sum = world.all_reduce(Buffer::F32(vec![1.0; elements]), ReduceOp::Sum);
            failed = sum.err().or(failed.take());
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
    }
    Ok(Rates {
        products,
        bandwidth,
        operation,
        attention,
        sums,
    })
}

/// Returns the time of an operation with few elements in seconds, as the mean of the forward and the backward.
fn probe_operation(world: &dyn Communicator) -> Result<f64, CommError> {
    const OPERATIONS: usize = 32;
    let device = burn::tensor::Device::flex().autodiff();
    let random = || Tensor::<2>::random([8, 8], Distribution::Default, &device).require_grad();
    let (x, weight) = (random(), random());
    let seconds = repeat(world, || {
        let mut y = x.clone();
        for _ in 0..OPERATIONS {
            y = y.matmul(weight.clone());
        }
        drop(y.sum().backward());
    })?;
    Ok(seconds / (2 * OPERATIONS) as f64)
}

/// Returns the FLOP/s of causal attention in the forward and in the backward.
fn probe_attention(world: &dyn Communicator) -> Result<[f64; 2], CommError> {
    let (heads, tokens, width) = (4, 256, 32);
    let device = burn::tensor::Device::flex().autodiff();
    let shape = [1, tokens, heads, width];
    let input = || Tensor::<4>::random(shape, Distribution::Default, &device).require_grad();
    let (q, k, v) = (input(), input(), input());
    let options = AttentionOptions {
        causal: true,
        ..AttentionOptions::default()
    };
    let forward = || flash_attention(q.clone(), k.clone(), v.clone(), None, &options);
    let of_forward = repeat(world, || drop(forward()))?;
    let of_both = repeat(world, || drop(forward().sum().backward()))?;
    let flops = 2.0 * (tokens * tokens * heads * width) as f64;
    let of_backward = (of_both - of_forward).max(1e-9);
    Ok([flops / of_forward, 2.5 * flops / of_backward])
}

/// Returns the time of an operation in seconds, as the median of several rounds. All ranks repeat the operation at the
/// same time. The first rank determines the number of repetitions.
fn repeat(world: &dyn Communicator, mut operation: impl FnMut()) -> Result<f64, CommError> {
    operation();
    let start = Instant::now();
    operation();
    let once = start.elapsed().as_secs_f64();
    let times = (REPEAT.as_secs_f64() / once).clamp(1.0, 1000.0);
    let times = world.broadcast(Buffer::F64(vec![times]), 0)?;
    let times = times.into_vec::<f64>()[0] as usize;
    let mut rounds = [0.0; ROUNDS];
    for seconds in &mut rounds {
        world.barrier()?;
        let start = Instant::now();
        for _ in 0..times {
            operation();
        }
        *seconds = start.elapsed().as_secs_f64() / times as f64;
    }
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[ROUNDS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The link reproduces the times from which it was computed.
    #[test]
    fn a_link_explains_both_times() {
        let link = link(4, [1e-5, 2e-3]);
        let steps = 6.0;
        for (elements, seconds) in BUFFERS.into_iter().zip([1e-5, 2e-3]) {
            let sent = 4.0 * elements as f64 * steps / 4.0;
            let found = steps * link.latency + sent / link.bandwidth;
            assert!((found / seconds - 1.0).abs() < 1e-9, "{found}");
        }
    }

    #[test]
    fn two_ranks_of_this_machine_are_measured() {
        let hardware = measure(2).unwrap();
        assert_eq!(Hardware::parse(&hardware.to_toml()).unwrap(), hardware);
        let one = measure(1).unwrap();
        assert!(one.memory > hardware.memory);
        assert!(hardware.product_share("f32", 16.0) < 1.0);
    }
}
