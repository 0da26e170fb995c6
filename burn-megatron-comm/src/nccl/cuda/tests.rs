//! What needs a GPU: run with BURN_MEGATRON_TEST_CUDA=1 on a machine that has one, and with `emulated` for
//! its value by `cargo xtask emulate nccl`.

use std::any::Any;
use std::env;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, process, thread};

use burn::tensor::{DType, Device, Tensor};
use burn_megatron_test_skip::{skipped, skipped_in_part};

use super::super::order::Order;
use super::super::tests::harness::{LONG, TestComm};
use super::super::tests::programs;
use super::super::transport::NcclTransport;
use super::NcclOptions;
use crate::collective::{
    Comm, start_all_gather, start_all_reduce, start_reduce_scatter, start_reduce_scatter_wide,
};
use crate::device::DeviceKind;
use crate::process::{FileBulletin, Transport};
use crate::{Buffer, CommError, ReduceOp, World};

/// Says that there is a GPU.
const CUDA: &str = "BURN_MEGATRON_TEST_CUDA";

/// GPUs are shared by the tests of a process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
static RUNS: AtomicUsize = AtomicUsize::new(0);

/// The devices of the ranks that there can be; `None`, and the reason, where the tests are not to run.
fn devices() -> Option<Vec<usize>> {
    if env::var(CUDA).is_err() {
        skipped(format!("{CUDA}=1 is not set"));
        return None;
    }
    let found = DeviceKind::Cuda.devices().expect("a GPU was promised");
    Some((0..found.len()).collect())
}

/// Worlds to try: one rank, two on one device where NCCL is told to allow that, and one per device.
fn worlds() -> Vec<Vec<usize>> {
    let Some(devices) = devices() else {
        return vec![];
    };
    let mut worlds = vec![vec![0]];
    match env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1") {
        true => worlds.extend([vec![0, 0], vec![0; 4]]),
        false => skipped_in_part("NCCL_MULTI_RANK_GPU_ENABLE=1 is not set: one rank on each GPU"),
    }
    if devices.len() > 1 {
        worlds.push(devices);
    }
    worlds
}

/// Runs `f` on a rank for each of `devices`.
fn over<T: Send>(
    devices: &[usize],
    options: NcclOptions,
    f: impl Fn(Arc<TestComm>, Device) -> T + Sync,
) -> Vec<T> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let number = RUNS.fetch_add(1, Ordering::Relaxed);
    let name = format!("burn-megatron-cuda-{}-{number}", process::id());
    let folder: PathBuf = env::temp_dir().join(name);
    let options = NcclOptions {
        alone_too: true,
        ..options
    };
    let results = thread::scope(|scope| {
        let ranks: Vec<_> = devices
            .iter()
            .enumerate()
            .map(|(rank, device)| {
                let (f, folder, size) = (&f, &folder, devices.len());
                scope.spawn(move || {
                    let board = Arc::new(FileBulletin::open(folder, "run").unwrap());
                    let pool = Arc::default();
                    let transport =
                        NcclTransport::open(*device, rank, size, board, pool, LONG, options);
                    let transport = transport.unwrap();
                    println!("rank {rank} of {size}: {}", transport.description());
                    let comm = TestComm::world(&transport, rank, size);
                    let result = f(comm, Device::cuda(*device));
                    transport.close(LONG).unwrap();
                    result
                })
            })
            .collect();
        let joined = ranks.into_iter().map(|rank| rank.join().map_err(told));
        joined.collect::<Vec<_>>()
    });
    let results: Result<Vec<_>, _> = results.into_iter().collect();
    let results = results.unwrap_or_else(|reason| panic!("{reason}"));
    fs::remove_dir_all(&folder).unwrap();
    results
}

/// Why a rank ended. A failed call ends it with its error.
fn told(payload: Box<dyn Any + Send>) -> String {
    match payload.downcast::<CommError>() {
        Ok(error) => error.to_string(),
        Err(_) => "a rank panicked: see above".into(),
    }
}

fn floats(x: Tensor<1>) -> Vec<f32> {
    x.cast(DType::F32).into_data().try_into_vec().unwrap()
}

/// Steps of the next, and the size of the matrices beside: a device that is emulated takes minutes for what a
/// GPU does in a second.
fn effort() -> (usize, usize) {
    match env::var(CUDA).is_ok_and(|value| value == "emulated") {
        true => (20, 64),
        false => (1000, 512),
    }
}

/// A kernel, a collective on what it gave, a kernel on what that gave: many times, with nothing read
/// before the end. Memory is used again and again, and other kernels run beside.
fn kernels_and_collectives(comm: &Comm, device: &Device) {
    let (rank, ranks) = (comm.rank(), comm.size());
    let (steps, side) = effort();
    // Large enough for registered memory.
    let mut x = Tensor::<1>::zeros([ranks << 18], device);
    let mut beside = Tensor::<2>::ones([side, side], device);
    for step in 0..steps {
        // Rank by rank, another number; together, `ranks`.
        let own = x + (2.0 * rank as f32 + 1.0) / ranks as f32;
        let sum = match step % 2 {
            0 => {
                let pending = start_all_reduce(own, ReduceOp::Sum, comm);
                beside = beside.matmul(Tensor::ones([side, side], device)) / side as f32;
                pending.wait()
            }
            _ => {
                let part = start_reduce_scatter(own, 0, comm).wait() * 1.0;
                start_all_gather(part, 0, comm).wait()
            }
        };
        x = (sum - ranks as f32) / ranks as f32 + 1.0;
    }
    let found = floats(x);
    // Exact where the number of ranks is a power of two.
    let near = |x: &f32| (x - steps as f32).abs() < 0.5;
    assert!(found.iter().all(near), "{:?}", &found[..8]);
    assert_eq!(beside.sum().into_scalar::<f32>(), (side * side) as f32);
}

#[test]
fn streams_keep_their_order() {
    for devices in worlds() {
        for order in [Order::Stream, Order::Context, Order::Host] {
            // Ranks of one process on one device share a context: each would wait for what the other is
            // still to be told.
            if order == Order::Context && devices.len() > 1 && devices[0] == devices[1] {
                continue;
            }
            let options = NcclOptions {
                order: Some(order),
                ..NcclOptions::default()
            };
            over(&devices, options, |comm, device| {
                kernels_and_collectives(&(comm as Comm), &device);
            });
        }
    }
}

#[test]
fn registered_memory_keeps_the_order_too() {
    for devices in worlds() {
        let options = NcclOptions {
            registered: true,
            ..NcclOptions::default()
        };
        over(&devices, options, |comm, device| {
            kernels_and_collectives(&(comm as Comm), &device);
        });
    }
}

/// The programs that the fake library runs, within rounding: NCCL orders sums, and averages, as it likes.
#[test]
fn programs_are_those_of_threads() {
    for devices in worlds() {
        for program in [
            programs::collectives,
            programs::uneven,
            programs::messages,
            programs::together,
            programs::splits,
        ] {
            let run = |rank: crate::Rank| Ok::<_, CommError>(program(rank.communicator()));
            let world = World::threads(devices.len()).unwrap();
            let expected = world.run(run).unwrap();
            let options = NcclOptions::default();
            let found = over(&devices, options, |comm, _| program(comm));
            for (found, expected) in found.concat().iter().zip(expected.concat()) {
                assert!(close(found, &expected), "{found:?} instead of {expected:?}");
            }
        }
    }
}

fn close(a: &Buffer, b: &Buffer) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() <= 0.01 * b.abs();
    match (a, b) {
        (Buffer::F64(a), Buffer::F64(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| near(*a, *b))
        }
        (Buffer::F32(a), Buffer::F32(b)) => {
            let pairs = a.iter().zip(b);
            a.len() == b.len() && pairs.into_iter().all(|(a, b)| near(*a as f64, *b as f64))
        }
        (Buffer::BF16(a), Buffer::BF16(b)) => {
            let mut pairs = a.iter().zip(b);
            a.len() == b.len() && pairs.all(|(a, b)| near(a.to_f64(), b.to_f64()))
        }
        (Buffer::F16(a), Buffer::F16(b)) => {
            let mut pairs = a.iter().zip(b);
            a.len() == b.len() && pairs.all(|(a, b)| near(a.to_f64(), b.to_f64()))
        }
        (a, b) => a == b,
    }
}

/// Sums of 16-bit gradients in 32 bits have the bits of the host's.
#[test]
fn wide_sums_are_those_of_threads() {
    for devices in worlds() {
        let ranks = devices.len();
        let values = |rank: usize| -> Vec<f32> {
            (0..ranks * 5000)
                .map(|i| ((i * 7919 + rank * 104_729) % 10_007) as f32 / 3.0 - 1000.0)
                .collect()
        };
        let sum = |comm: &Comm, device: &Device| {
            let values = values(comm.rank());
            let x = Tensor::<1>::from_data(values.as_slice(), (device, DType::BF16));
            floats(start_reduce_scatter_wide(x, comm).wait())
        };
        let on_host = World::threads(ranks).unwrap();
        let run =
            |rank: crate::Rank| Ok::<_, CommError>(sum(&rank.communicator(), &Device::flex()));
        let expected = on_host.run(run).unwrap();
        let options = NcclOptions::default();
        let found = over(&devices, options, |comm, device| {
            sum(&(comm as Comm), &device)
        });
        assert_eq!(found, expected);
    }
}
