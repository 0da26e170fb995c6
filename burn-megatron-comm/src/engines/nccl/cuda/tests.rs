//! Tests that require a GPU. They run with BURN_MEGATRON_TEST_CUDA=1 on a machine that has a GPU.
//! `cargo xtask emulate nccl` runs them with the value `emulated`.

use std::any::Any;
use std::env;
use std::sync::Arc;
use std::thread;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron_test_support::{skipped, skipped_in_part};
use cudarc::driver::sys;
use parking_lot::Mutex;

use super::super::driver::{DeviceDriver, Priority};
use super::super::stream_order::StreamOrder;
use super::super::tests::collectives::{
    even_all_to_all, receives_ahead, reduce_scatter_in_f32, start_all_gather, start_all_reduce,
    start_reduce_scatter_coalesced, to_buffer,
};
use super::super::tests::harness::{TIMEOUT, TestComm};
use super::super::tests::programs;
use super::super::transport::NcclTransport;
use super::NcclOptions;
use super::cube::cuda_index;
use super::driver::CudaDeviceDriver;
use crate::nccl_config::{NcclConfig, RegisteredBuffers};
use crate::process::{MemoryStore, Transport};
use crate::{Buffer, CommError, Communicator, ReduceOp, World, probe, sum_parts_in_f32};

/// An environment variable that is set on machines with a GPU.
const CUDA: &str = "BURN_MEGATRON_TEST_CUDA";

/// A lock that the tests of a process take, because they share the GPUs.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Returns the devices of the ranks. If the tests cannot run, prints the reason and returns `None`.
fn devices() -> Option<Vec<usize>> {
    if env::var(CUDA).is_err() {
        skipped(format!("{CUDA}=1 is not set"));
        return None;
    }
    let driver = probe::cuda_driver().expect("a GPU was promised");
    Some((0..driver.devices).collect())
}

/// Returns the worlds to test: one rank, two ranks on one device if NCCL allows this, and one rank per device.
fn worlds() -> Vec<Vec<usize>> {
    let Some(devices) = devices() else {
        return vec![];
    };
    let mut worlds = vec![vec![0]];
    if env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1") {
        worlds.extend([vec![0, 0], vec![0; 4]])
    } else {
        skipped_in_part("NCCL_MULTI_RANK_GPU_ENABLE=1 is not set: one rank on each GPU")
    }
    if devices.len() > 1 {
        worlds.push(devices);
    }
    worlds
}

/// Runs `f` on one rank per device.
fn over<T: Send>(
    devices: &[usize],
    options: NcclOptions,
    f: impl Fn(Arc<TestComm>, Device) -> T + Sync,
) -> Vec<T> {
    let _alone = ONE_AT_A_TIME.lock();
    let store: Arc<MemoryStore> = Arc::default();
    let options = NcclOptions {
        use_for_one_rank: true,
        ..options
    };
    let results = thread::scope(|scope| {
        let ranks: Vec<_> = devices
            .iter()
            .enumerate()
            .map(|(rank, device)| {
                let (f, store, size) = (&f, store.clone(), devices.len());
                let options = options.clone();
                scope.spawn(move || {
                    let pool = Arc::default();
                    let transport =
                        NcclTransport::open(*device, rank, size, store, pool, TIMEOUT, options);
                    let transport = transport.unwrap();
                    println!("rank {rank} of {size}: {}", transport.description());
                    let comm = TestComm::world(&transport, rank, size);
                    let result = f(comm, Device::cuda(*device));
                    transport.close(TIMEOUT).unwrap();
                    result
                })
            })
            .collect();
        let joined = ranks.into_iter().map(|rank| rank.join().map_err(reason));
        joined.collect::<Vec<_>>()
    });
    let results: Result<Vec<_>, _> = results.into_iter().collect();
    results.unwrap_or_else(|reason| panic!("{reason}"))
}

/// Returns the reason why a rank has ended. If a call fails, the rank ends with the error of the call.
fn reason(payload: Box<dyn Any + Send>) -> String {
    match payload.downcast::<CommError>() {
        Ok(error) => error.to_string(),
        Err(_) => "a rank panicked: see above".into(),
    }
}

fn floats(x: Tensor<1>) -> Vec<f32> {
    x.cast(DType::F32).into_data().try_into_vec().unwrap()
}

/// Returns the number of steps of the next test and the size of its matrices. An emulated device takes minutes for work
/// that takes one second on a GPU.
fn effort() -> (usize, usize) {
    if env::var(CUDA).is_ok_and(|value| value == "emulated") {
        (20, 64)
    } else {
        (1000, 512)
    }
}

/// Repeatedly runs a kernel, a collective on the result of the kernel, and a kernel on the result of the collective. No
/// value is read before the end. Memory is reused, and other kernels run concurrently.
fn kernels_and_collectives(comm: &dyn Communicator, device: &Device) {
    let (rank, ranks) = (comm.rank(), comm.size());
    let (steps, side) = effort();
    // Large enough for registered memory.
    let mut x = Tensor::<1>::zeros([ranks << 18], device);
    let mut beside = Tensor::<2>::ones([side, side], device);
    for step in 0..steps {
        // Each rank adds a different number. The sum of these numbers is `ranks`.
        let own = x + (2.0 * rank as f32 + 1.0) / ranks as f32;
        let sum = match step % 2 {
            0 => {
                let pending = start_all_reduce(own, comm);
                beside = beside.matmul(Tensor::ones([side, side], device)) / side as f32;
                pending.wait().unwrap()
            }
            _ => {
                let part = start_reduce_scatter_coalesced(vec![own], comm)
                    .remove(0)
                    .wait()
                    .unwrap()
                    * 1.0;
                start_all_gather(part, comm).wait().unwrap()
            }
        };
        x = (sum - ranks as f32) / ranks as f32 + 1.0;
    }
    let found = floats(x);
    // Exact if the number of ranks is a power of two.
    let near = |x: &f32| (x - steps as f32).abs() < 0.5;
    assert!(found.iter().all(near), "{:?}", &found[..8]);
    assert_eq!(beside.sum().into_scalar::<f32>(), (side * side) as f32);
}

#[test]
fn streams_keep_their_order() {
    for devices in worlds() {
        for order in [StreamOrder::Stream, StreamOrder::Context, StreamOrder::Host] {
            // Ranks of one process on one device share a context. Each rank would wait for work that the other rank has
            // not submitted yet.
            if order == StreamOrder::Context && devices.len() > 1 && devices[0] == devices[1] {
                continue;
            }
            let options = NcclOptions {
                order: Some(order),
                ..NcclOptions::default()
            };
            over(&devices, options, |comm, device| {
                kernels_and_collectives(&*comm, &device);
            });
        }
    }
}

#[test]
fn receives_are_posted_ahead_by_both_neighbours() {
    for devices in worlds() {
        for order in [StreamOrder::Stream, StreamOrder::Host] {
            for ahead in [0, 1, 3] {
                let options = NcclOptions {
                    order: Some(order),
                    ..NcclOptions::default()
                };
                let run = |comm: Arc<TestComm>, device: Device| {
                    receives_ahead(&*comm, &device, ahead);
                };
                over(&devices, options, run);
            }
        }
    }
}

/// Starts the reductions of buckets over a data group. While they are in flight, runs collectives of a tensor group and
/// kernels one after the other on a high-priority stream.
fn buckets_beside_tensor_groups(comm: &TestComm, device: &Device) {
    let (ranks, all) = (comm.size(), vec![(0..comm.size()).collect::<Vec<_>>()]);
    let [data, tensor] = ["data", "tensor"].map(|name| comm.split(name, &all).unwrap());
    let (steps, _) = effort();
    let mut x = Tensor::<1>::ones([1000], device);
    let mut buckets = vec![];
    for step in 0..steps {
        let bucket = Tensor::<1>::ones([ranks << 10], device) * (step + 1) as f32;
        buckets.push(start_all_reduce(bucket, &*data));
        x = start_all_reduce(x, &*tensor).wait().unwrap() / ranks as f32;
    }
    assert_eq!(floats(x), vec![1.0; 1000]);
    for (step, bucket) in buckets.into_iter().enumerate() {
        let sum = ((step + 1) * ranks) as f32;
        assert_eq!(floats(bucket.wait().unwrap()), vec![sum; ranks << 10]);
    }
}

#[test]
fn tensor_groups_run_beside_buckets() {
    for devices in worlds() {
        for eager_init in [false, true] {
            let options = NcclOptions {
                config: NcclConfig {
                    eager_init,
                    ..NcclConfig::default()
                },
                ..NcclOptions::default()
            };
            over(&devices, options, |comm, device| {
                buckets_beside_tensor_groups(&comm, &device);
            });
        }
    }
}

#[test]
fn registered_memory_keeps_the_order_too() {
    for devices in worlds() {
        for registered in [RegisteredBuffers::Allocations, RegisteredBuffers::Windows] {
            let options = NcclOptions {
                config: NcclConfig {
                    registered_buffers: Some(registered),
                    ..NcclConfig::default()
                },
                ..NcclOptions::default()
            };
            over(&devices, options, |comm, device| {
                kernels_and_collectives(&*comm, &device);
            });
        }
    }
}

/// A stream capture in global mode. During the capture, other threads must not poll or allocate, unless they ignore
/// captures.
struct GlobalCapture(sys::CUstream);

impl GlobalCapture {
    fn begin(device: &Device) -> Self {
        let driver = CudaDeviceDriver::new(cuda_index(device).unwrap()).unwrap();
        driver.make_current().unwrap();
        let stream = driver.create_stream(Priority::Normal).unwrap();
        let stream = stream.0 as sys::CUstream;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream was created above.
        let begun = unsafe { sys::cuStreamBeginCapture_v2(stream, mode) };
        begun.result().unwrap();
        Self(stream)
    }

    /// Ends the capture. Fails if the capture was invalidated.
    fn end(self) {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream was passed to `begin` on the same thread. The graph is written before the call returns.
        unsafe {
            let ended = sys::cuStreamEndCapture(self.0, &mut graph);
            ended.result().unwrap();
            sys::cuGraphDestroy(graph).result().unwrap();
            sys::cuStreamDestroy_v2(self.0).result().unwrap();
        }
    }
}

#[test]
fn collectives_go_on_while_a_stream_is_captured() {
    let sum = |comm: &dyn Communicator| {
        let sum = comm.all_reduce(vec![1.0f32; 1000].into(), ReduceOp::Sum);
        let sum: Vec<f32> = sum.unwrap().into_vec();
        assert_eq!(sum, vec![comm.size() as f32; 1000]);
    };
    for devices in worlds() {
        over(&devices, NcclOptions::default(), |comm, device| {
            sum(&*comm);
            let capture = (comm.rank() == 0).then(|| GlobalCapture::begin(&device));
            comm.barrier().unwrap();
            sum(&*comm);
            // A new communicator allocates memory too.
            let all = vec![(0..comm.size()).collect::<Vec<_>>()];
            sum(&*comm.split("beside", &all).unwrap());
            comm.barrier().unwrap();
            capture.into_iter().for_each(GlobalCapture::end);
        });
    }
}

/// Runs the programs of the tests with the fake library. The results match only within rounding errors, because NCCL
/// chooses the order of the additions in sums and averages.
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

/// Sums of 16-bit gradients that are accumulated in 32 bits are bit-identical to the sums on the host.
#[test]
fn wide_sums_are_those_of_threads() {
    for devices in worlds() {
        let ranks = devices.len();
        let values = |rank: usize| -> Vec<f32> {
            (0..ranks * 5000)
                .map(|i| ((i * 7919 + rank * 104_729) % 10_007) as f32 / 3.0 - 1000.0)
                .collect()
        };
        let x = |rank: usize, device: &Device| {
            Tensor::<1>::from_data(values(rank).as_slice(), (device, DType::BF16))
        };
        let on_host = |rank: crate::Rank| {
            let input = to_buffer(x(rank.rank(), &Device::flex()));
            let call = even_all_to_all(input.len(), ranks);
            let received = rank.communicator().start(call, input)?.wait()?;
            let mut sums = vec![0f32; 5000];
            sum_parts_in_f32(&received, ranks, &mut sums);
            Ok::<_, CommError>(sums)
        };
        let expected = World::threads(ranks).unwrap().run(on_host).unwrap();
        let options = NcclOptions::default();
        let found = over(&devices, options, |comm, device| {
            floats(reduce_scatter_in_f32(x(comm.rank(), &device), &*comm))
        });
        assert_eq!(found, expected);
    }
}
