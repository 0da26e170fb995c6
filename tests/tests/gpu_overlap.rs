//! Tests chunked exchanges of the tensor axis and transfers of pipelines on a device. The results must equal the CPU.
//! Over NCCL, the order of the calls is tested too, and that they are calls on the device.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

use std::slice::from_ref;
use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_megatron::comm::{
    Buffer, Call, CommError, Communicator, DeviceCommunicator, DevicePending, Engine, Group,
    ParallelContext, Pending, Rank, World,
};
use burn_megatron::mesh::{Axis, Grid, ParallelConfig, TpCommOverlap};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::{Activation, ModelBuilder, ParallelMlp, ParallelMlpConfig};
use burn_megatron_comm_testing::join_as_threads;
use burn_megatron_models::TransformerConfig;
use burn_megatron_test_support::skipped;
use burn_megatron_tests::{Text, gpu, small_llama};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, TrainConfig, Trainer};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const BATCH: usize = 2;
const SEQ: usize = 8;
const HIDDEN: usize = 16;

fn plain() -> ParallelConfig {
    ParallelConfig::new()
        .with_data(1)
        .with_tensor(2)
        .with_sequence_parallel(true)
}

fn chunked() -> [(&'static str, ParallelConfig); 2] {
    let bulk = plain().with_tp_comm_overlap(TpCommOverlap::Bulk);
    [
        ("ring", plain().with_tp_comm_overlap(TpCommOverlap::Ring)),
        ("bulk", bulk.with_tp_comm_overlap_num_splits(2)),
    ]
}

/// Returns an MLP on a rank, and its input.
fn mlp(groups: &ParallelContext, device: &Device) -> Result<(ParallelMlp, Tensor<3>), AnyError> {
    let device = device.clone().autodiff();
    let builder = ModelBuilder::with(groups, &device, 3, DType::F32);
    let config = ParallelMlpConfig::new(HIDDEN, 2 * HIDDEN, Activation::GeluTanh);
    let mlp = config.with_bias(false).init(&builder)?;
    let tokens = SEQ / 2;
    let value = |i: usize| ((i + 1000 * groups.tensor().rank()) as f32 * 0.7).sin();
    let values: Vec<_> = (0..BATCH * tokens * HIDDEN).map(value).collect();
    let x = TensorData::new(values, [BATCH, tokens, HIDDEN]);
    let x = Tensor::from_data(x, (&device, DType::F32));
    Ok((mlp, x.require_grad()))
}

type RunRank<'a, T> = &'a (dyn Fn(&Rank) -> Result<T, AnyError> + Sync);

/// The output of a rank and its gradients.
type RankResults = Vec<Vec<f32>>;

/// Runs a function on the ranks.
type OnRanks = fn(RunRank<'_, RankResults>) -> Vec<RankResults>;

/// Runs `f` on two ranks of the engine `threads`.
fn on_threads<T: Send>(f: RunRank<'_, T>) -> Vec<T> {
    let world = World::threads(2).unwrap();
    world.run(|rank| f(&rank)).unwrap()
}

/// Runs `f` on two ranks of the engine `nccl`.
fn over_nccl<T: Send>(f: RunRank<'_, T>) -> Vec<T> {
    let joined = join_as_threads(2, |launch| {
        let world = World::processes(launch).engine(Engine::Nccl);
        world.run(|rank| f(&rank)).unwrap()
    });
    joined.into_iter().flatten().collect()
}

/// Returns the output of each rank, and the gradients of the input and the weights.
fn results(layout: &ParallelConfig, device: &Device, on_ranks: OnRanks) -> Vec<Vec<f32>> {
    let run = |rank: &Rank| {
        let groups = ParallelContext::new(layout, rank)?;
        let (mlp, x) = mlp(&groups, device)?;
        let y = mlp.forward(x.clone());
        let gradients = (y.clone() * y.clone()).sum().backward();
        let values = |data: TensorData| data.convert::<f32>().try_into_vec().unwrap();
        let of_input = x.grad(&gradients).ok_or("no gradient")?;
        let mut all = vec![values(y.into_data()), values(of_input.into_data())];
        for weight in [mlp.up.weight.val(), mlp.down.weight.val()] {
            let gradient = weight.grad(&gradients).ok_or("no gradient")?;
            all.push(values(gradient.into_data()));
        }
        Ok(all)
    };
    on_ranks(&run).concat()
}

/// The tolerance between devices. The largest observed difference is 1.2e-4, on the emulated GPU.
const OF_CPU: f32 = 1e-3;
/// The tolerance between results of the same device.
const OF_DEVICE: f32 = 1e-5;

fn assert_near(what: &str, found: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let largest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() <= tolerance * largest, "{what}: {a} and {b}");
        }
    }
}

/// Compares the ranks on the device with the CPU, and chunked exchanges with whole exchanges.
fn check(on_ranks: OnRanks) {
    let on_cpu = results(&plain(), &Device::flex(), on_threads);
    let whole = results(&plain(), &gpu(), on_ranks);
    assert_near("whole", &whole, &on_cpu, OF_CPU);
    for (name, layout) in chunked() {
        assert_near(name, &results(&layout, &gpu(), on_ranks), &whole, OF_DEVICE);
    }
}

#[test]
fn chunks_on_the_device_compute_what_the_cpu_does() {
    check(on_threads);
}

type Journal = Arc<Mutex<Vec<String>>>;

/// Records when calls on the device start, and when they are waited for.
#[derive(Debug)]
struct Recording {
    inner: Arc<dyn Communicator>,
    journal: Journal,
}

impl Communicator for Recording {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        let name = call.name();
        self.journal.lock().unwrap().push(format!("host {name}"));
        self.inner.start(call, input)
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        self.inner.split(name, groups)
    }

    fn on_device(&self) -> Option<&dyn DeviceCommunicator> {
        self.inner.on_device().map(|_| self as _)
    }
}

impl DeviceCommunicator for Recording {
    fn takes(&self, device: &Device) -> bool {
        let engine = self.inner.on_device();
        engine.is_some_and(|engine| engine.takes(device))
    }

    fn allows_early_receives(&self) -> bool {
        let engine = self.inner.on_device();
        engine.is_some_and(|engine| engine.allows_early_receives())
    }

    fn start(&self, calls: Vec<(Call, Tensor<1>)>) -> Result<Vec<DevicePending>, CommError> {
        let names: Vec<_> = calls.iter().map(|(call, _)| call.name()).collect();
        let mut journal = self.journal.lock().unwrap();
        journal.extend(names.iter().map(|name| format!("start {name}")));
        let engine = self.inner.on_device().expect("the engine takes tensors");
        let wrapped = engine.start(calls)?.into_iter().zip(names);
        let wrap = |(pending, name): (DevicePending, &'static str)| {
            let journal = self.journal.clone();
            DevicePending::new(move || {
                let result = pending.wait();
                journal.lock().unwrap().push(format!("end {name}"));
                result
            })
        };
        Ok(wrapped.map(wrap).collect())
    }
}

/// Records the products of the thread.
struct Products(Journal);

impl Subscriber for Products {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.name() == "product"
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        if span.metadata().name() == "product" {
            self.0.lock().unwrap().push("product".into());
        }
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Returns the events of rank 0 in the forward pass, in order.
fn events(layout: &ParallelConfig) -> Vec<String> {
    // With a single subscriber, a thread of another test without a subscriber could reach a span first and disable
    // the span for all threads.
    let _second = tracing::Dispatch::new(Products(Journal::default()));
    let run = |rank: &Rank| {
        let journal = Journal::default();
        let groups = ParallelContext::new(layout, rank)?;
        let tensor = Arc::new(Recording {
            inner: groups.tensor().clone(),
            journal: journal.clone(),
        });
        let (mlp, x) = mlp(&groups.with_tensor(tensor), &gpu())?;
        journal.lock().unwrap().clear();
        let products = Products(journal.clone());
        let y = tracing::subscriber::with_default(products, || mlp.forward(x));
        let events = journal.lock().unwrap().clone();
        // Waits until the device is done.
        drop(y.into_data());
        Ok(events)
    };
    over_nccl(&run).swap_remove(0)
}

/// A call is started before the product that hides it is launched. The ranks share a device, which NCCL allows with
/// NCCL_MULTI_RANK_GPU_ENABLE.
#[test]
fn calls_over_nccl_are_started_before_the_products_that_hide_them() {
    if !cfg!(feature = "cuda") || std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_err() {
        skipped("needs the feature cuda and NCCL_MULTI_RANK_GPU_ENABLE=1");
        return;
    }
    let [(_, ring), (_, bulk)] = chunked();
    // A rank has two chunks. Its own products hide the gathers and the sums of the other rank's chunk.
    let ring_calls = [
        "start all_to_all",
        "start all_to_all",
        "product",
        "product",
        "end all_to_all",
        "product",
        "end all_to_all",
        "product",
        "product",
        "start all_to_all",
        "product",
        "start all_to_all",
        "product",
        "product",
        "end all_to_all",
        "end all_to_all",
    ];
    assert_eq!(events(&ring), ring_calls);
    let bulk_calls = [
        "start all_gather",
        "end all_gather",
        "start all_gather",
        "product",
        "end all_gather",
        "product",
        "product",
        "start reduce_scatter",
        "product",
        "start reduce_scatter",
        "end reduce_scatter",
        "end reduce_scatter",
    ];
    assert_eq!(events(&bulk), bulk_calls);
    check(over_nccl);
}

/// The losses and gradient norms of a run.
#[derive(Default)]
struct Losses(Vec<f32>);

impl Observer for Losses {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        let numbers = [metrics.loss, metrics.gradient_norm];
        self.0.extend(numbers.map(|number| number as f32));
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

/// Trains three steps of four micro-batches on two stages. Returns the losses, and the transfers of a rank, through
/// the host or on the device.
fn train_stages(
    rank: &Rank,
    fp8_transfers: bool,
    device: &Device,
) -> Result<(Vec<f32>, Vec<String>), AnyError> {
    let layout = ParallelConfig::new().with_data(1).with_pipeline(2);
    let layout = layout.with_fp8_transfers(fp8_transfers);
    let groups = ParallelContext::new(&layout, rank)?;
    let journal = Journal::default();
    let recording = Arc::new(Recording {
        inner: groups.pipeline().clone(),
        journal: journal.clone(),
    });
    let groups = groups.with_group(Grid::Dense, Axis::Pipeline, recording);
    let config = TransformerConfig {
        layers: 2,
        vocabulary: 256,
        ..small_llama().config
    };
    let train = TrainConfig {
        steps: 3,
        micro_batch_size: 1,
        global_batch_size: 4,
        held_out_samples: 1,
        warmup_steps: 0,
        ..TrainConfig::default()
    };
    let model = config.init_with(ModelBuilder::with(&groups, device, 1, DType::F32))?;
    let mut trainer = Trainer::new(model, &groups, device, &train)?;
    let mut losses = Losses::default();
    let text = Text::new();
    trainer.fit(&text.open(), &mut losses)?;
    let calls = journal.lock().unwrap().clone();
    Ok((losses.0, calls))
}

#[test]
fn stages_over_nccl_exchange_tensors_of_the_device() {
    if !cfg!(feature = "cuda") || std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_err() {
        skipped("needs the feature cuda and NCCL_MULTI_RANK_GPU_ENABLE=1");
        return;
    }
    for fp8_transfers in [false, true] {
        let on_cpu = on_threads(&|rank: &Rank| train_stages(rank, fp8_transfers, &Device::flex()));
        let found = over_nccl(&|rank: &Rank| train_stages(rank, fp8_transfers, &gpu()));
        for ((expected, _), (losses, calls)) in on_cpu.iter().zip(&found) {
            assert_near("losses", from_ref(losses), from_ref(expected), OF_CPU);
            let count = |name: &str| calls.iter().filter(|call| *call == name).count();
            // One tensor in each direction per micro-batch, and one of the held-out sample.
            let on_device = count("start send") + count("start receive");
            assert_eq!(on_device, 3 * 4 * 2 + 1, "{calls:?}");
            // The shapes, once per step, and the shapes of the evaluation.
            let on_host = count("host send") + count("host receive");
            assert_eq!(on_host, 3 + 1, "{calls:?}");
        }
    }
}
