//! Tests that the memory that a device's pool uses in a training step equals the plan.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::kernels::record::ShapeSettings;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::{ModelBuilder, RecomputeConfig, RecomputeMethod};
use burn_megatron_models::TransformerConfig;
use burn_megatron_plan::memory::{MemoryRequest, plan_memory};
use burn_megatron_tests::{Text, gpu, small_llama};
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use burn_megatron_verify::memory_report::memory_report;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The tests share the pool, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

const MICRO_BATCH: usize = 4;

/// The pause between two queries of the pool, so that the step can use the cores.
const PAUSE: Duration = Duration::from_millis(1);

/// The number of steps. With several steps, the peak is observed at least once.
const STEPS: usize = 3;

/// Returns a model whose activations are as large as its state.
fn model() -> TransformerConfig {
    TransformerConfig {
        hidden: 128,
        layers: 3,
        heads: 2,
        groups: Some(1),
        mlp_width: Some(384),
        context: 128,
        ..small_llama().config
    }
}

fn planned(recompute: &RecomputeConfig) -> u64 {
    let request = MemoryRequest {
        layout: &ParallelConfig::new(),
        ranks: 1,
        micro_batch_size: MICRO_BATCH,
        sequence_length: model().context,
        micro_batches: 1,
        sharding: &DataParallelConfig::default(),
        kernels: &KernelChoices::default(),
        fp8: &Fp8Config::default(),
        lora: None,
        recompute,
        settings: ShapeSettings::default(),
        slack: 1.0,
    };
    let report = plan_memory(&model(), &request).unwrap();
    report.fullest().1.peak.total()
}

/// Returns the maximum number of bytes in use while `run` runs. The pool is queried repeatedly.
fn most_in_use(
    device: &Device,
    run: impl FnOnce() -> Result<(), AnyError>,
) -> Result<u64, AnyError> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let most = scope.spawn(|| {
            let mut most = 0;
            while !done.load(Ordering::Relaxed) {
                let usage = device.memory_pool_usage();
                most = most.max(usage.map_or(0, |usage| usage.bytes_in_use));
                thread::sleep(PAUSE);
            }
            most
        });
        let result = run();
        done.store(true, Ordering::Relaxed);
        let most = most.join().map_err(|_| "the pool could not be asked")?;
        result.map(|()| most)
    })
}

/// Returns the maximum number of bytes in use in a step, and the number of bytes that the pool reserves after the
/// step.
fn measured(recompute: &RecomputeConfig) -> (u64, u64) {
    let run = |rank| {
        let device = gpu();
        let groups = ParallelContext::new(&ParallelConfig::new(), &rank)?;
        let builder = ModelBuilder::with(&groups, &device, 3, DType::F32);
        let model = model().init_with(builder.with_recompute(recompute)?)?;
        let config = TrainConfig {
            micro_batch_size: MICRO_BATCH,
            global_batch_size: MICRO_BATCH,
            ..TrainConfig::default()
        };
        let text = Text::new();
        let samples = text.open().samples(128, 1)?;
        let mut trainer = Trainer::new(model, &groups, &device, &config)?;
        // The first step selects kernels. Its trials use memory too.
        trainer.step(&samples, &mut NoopObserver)?;
        device.sync()?;
        device.memory_cleanup();
        let most = most_in_use(&device, || {
            for _ in 0..STEPS {
                trainer.step(&samples, &mut NoopObserver)?;
                device.sync()?;
            }
            Ok(())
        })?;
        let usage = device.memory_pool_usage().ok_or("no pool")?;
        Ok::<_, AnyError>((most, usage.bytes_reserved))
    };
    World::threads(1).unwrap().run(run).unwrap().remove(0)
}

#[test]
fn the_pool_has_in_use_what_is_planned() {
    let _alone = ALONE.lock();
    for recompute in [
        RecomputeConfig::full(RecomputeMethod::Uniform, 1),
        RecomputeConfig::default(),
    ] {
        let (planned, (most, reserved)) = (planned(&recompute), measured(&recompute));
        println!("{planned} planned, {most} in use, {reserved} reserved");
        // A short peak may be missed.
        let ratio = most as f64 / planned as f64;
        assert!(
            (0.8..1.1).contains(&ratio),
            "{planned} planned, {most} in use"
        );
    }
}

/// Two layers of 256 x 256: the weights, the tensors that a step keeps, and no permanent memory.
#[test]
fn the_report_of_a_module_asks_the_pool() {
    let _alone = ALONE.lock();
    let device = gpu();
    let layers: Vec<_> = (0..2)
        .map(|_| LinearConfig::new(256, 256).init(&Device::flex()))
        .collect();
    let x = Tensor::<2>::ones([256, 256], &Device::flex());
    let loss = |layers: &Vec<Linear>, x: &Tensor<2>| {
        let layers = layers.iter();
        layers
            .fold(x.clone(), |x, layer| layer.forward(x).tanh())
            .sum()
    };
    let report = memory_report(&layers, &x, loss, &device, 4).unwrap();
    println!("{report}");
    let matrix = 4 * 256 * 256;
    assert_eq!(report.gradients, 2 * (matrix + 4 * 256));
    assert!(report.kept >= 2 * matrix && report.kept < 8 * matrix);
    assert!(report.reserved.unwrap() >= report.kept + 2 * matrix);
    assert_eq!(report.growth, None);
    let mut all = vec![];
    let growing = |layers: &Vec<Linear>, x: &Tensor<2>| {
        let device = layers[0].weight.device();
        // The recorded forward pass also keeps a tensor that is not on the device.
        all.push(Tensor::<1>::zeros([100_000], &device.without_autodiff()));
        loss(layers, x)
    };
    let report = memory_report(&layers, &x, growing, &device, 4).unwrap();
    assert!(report.growth.unwrap().bytes_per_step >= 400_000);
}
