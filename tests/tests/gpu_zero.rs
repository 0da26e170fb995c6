//! Tests sharding and 16-bit types on a device: the results equal the CPU, and are bit-equal for all ZeRO stages.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

use burn::tensor::{DType, Device, Int, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{
    DataParallelConfig, DistributedDataParallel, OffloadConfig, Precision, ZeroStage,
};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::{ModelBuilder, RecomputeConfig, RecomputeMethod};
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron_tests::{gpu, small_llama};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Returns the weights of rank 0 after three steps of two ranks.
fn train(device: &Device, settings: &DataParallelConfig) -> Vec<f32> {
    train_with(device, settings, &RecomputeConfig::default())
}

fn train_with(
    device: &Device,
    settings: &DataParallelConfig,
    recompute: &RecomputeConfig,
) -> Vec<f32> {
    let mesh = ParallelConfig::new().with_data(2);
    let config = small_llama().config;
    let run = |rank| {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let scope = ModelBuilder::with(&groups, device, 3, DType::F32);
        let scope = scope.with_compute_dtype(settings.precision.of(DType::F32));
        let scope = scope.with_recompute(recompute)?;
        let model = config.init_with(scope)?;
        let mut ddp = DistributedDataParallel::with(model, &groups, settings)?;
        // A large epsilon limits the effect of rounding in small gradients.
        let adam = AdamWConfig {
            epsilon: 1e-3,
            ..AdamWConfig::default()
        };
        let mut optimizer = ParallelAdamW::new(&adam, &ddp)?;
        let inputs = device.clone().autodiff();
        for step in 0..3 {
            for micro_batch in 0..2 {
                ddp.position().set(step as u64, 0);
                let first = (step * 5 + micro_batch * 2 + groups.rank()) as i64;
                let tokens = |from: i64| {
                    let tokens = (0..config.context as i64).map(|i| (from + i * i) % 21);
                    let tokens: Vec<i64> = tokens.collect();
                    Tensor::<1, Int>::from_data(&tokens[..], &inputs).unsqueeze::<2>()
                };
                let loss = ddp.forward(device, |model| {
                    model.losses(tokens(first), tokens(first + 1)).sum()
                });
                match micro_batch {
                    1 => ddp.backward_last(loss),
                    _ => ddp.backward(loss),
                };
            }
            let gradients = ddp.reduce(2 * config.context as u64)?;
            optimizer.step(0.01, &mut ddp, gradients);
        }
        ddp.check_replicas()?;
        let inputs = ddp.recompute().offloaded();
        assert_eq!((inputs.device, inputs.host), (0, 0));
        // Two blocks, and three steps of two micro-batches.
        let left = if recompute.offload.bytes > 0 { 6 } else { 0 };
        let input = config.context * config.hidden * settings.precision.of(DType::F32).size();
        assert_eq!(inputs.traffic.up, (left * input) as u64);
        assert_eq!(inputs.traffic.down, inputs.traffic.up);
        let (offload, traffic) = (ddp.offload(), ddp.host_traffic());
        let expected = [3 * offload.up, 3 * offload.down];
        assert_eq!([traffic.up, traffic.down], expected);
        let values = |tensor: Tensor<1>| tensor.into_data().try_into_vec::<f32>();
        let parameters: Result<Vec<_>, _> = ddp.parameters().into_iter().map(values).collect();
        Ok::<_, AnyError>(parameters.map_err(|error| format!("{error:?}"))?.concat())
    };
    World::threads(2).unwrap().run(run).unwrap().remove(0)
}

fn settings(stage: ZeroStage, precision: Precision) -> DataParallelConfig {
    DataParallelConfig {
        zero_stage: stage,
        precision,
        bucket_size: (stage < ZeroStage::Parameters).then_some(1000),
        ..DataParallelConfig::default()
    }
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    apart.fold(0.0, f32::max)
}

#[test]
fn every_stage_computes_on_the_device_what_the_cpu_does() {
    let expected = train(
        &Device::flex(),
        &settings(ZeroStage::Replicated, Precision::F32),
    );
    let first = train(&gpu(), &settings(ZeroStage::Replicated, Precision::F32));
    let apart = furthest(&first, &expected);
    assert!(apart < 1e-4, "{apart}");
    // Two micro-batches: from ZeRO-2 on, their gradients are added in a different order.
    for (stage, tolerance) in [
        (ZeroStage::Optimizer, 0.0),
        (ZeroStage::Gradients, 1e-5),
        (ZeroStage::Parameters, 1e-5),
    ] {
        let apart = furthest(&train(&gpu(), &settings(stage, Precision::F32)), &first);
        assert!(apart <= tolerance, "ZeRO-{stage}: {apart}");
    }
}

#[test]
fn the_host_steps_what_the_device_does() {
    for (stage, precision) in [
        (ZeroStage::Replicated, Precision::F32),
        (ZeroStage::Gradients, Precision::F16),
        (ZeroStage::Parameters, Precision::F32),
    ] {
        let settings = settings(stage, precision);
        let on_device = train(&gpu(), &settings);
        for optimizer in [0.5, 1.0] {
            let offload = OffloadConfig { optimizer };
            let settings = DataParallelConfig {
                offload,
                ..settings.clone()
            };
            let apart = furthest(&train(&gpu(), &settings), &on_device);
            // A product and a sum may be one operation on the device. Weights are then rounded to 16 bits.
            let tolerance = if precision == Precision::F16 {
                1e-3
            } else {
                1e-5
            };
            assert!(apart <= tolerance, "ZeRO-{stage}, {optimizer}: {apart}");
        }
    }
}

#[test]
fn inputs_of_recomputed_blocks_return_from_the_host_as_they_were() {
    for (stage, precision) in [
        (ZeroStage::Replicated, Precision::F32),
        (ZeroStage::Parameters, Precision::F16),
    ] {
        let settings = settings(stage, precision);
        let mut recompute = RecomputeConfig::full(RecomputeMethod::Uniform, 1);
        let kept = train_with(&gpu(), &settings, &recompute);
        recompute.offload.bytes = 1 << 20;
        let found = train_with(&gpu(), &settings, &recompute);
        assert_eq!(furthest(&found, &kept), 0.0, "ZeRO-{stage} in {precision}");
    }
}

#[test]
fn f16_on_the_device_stays_near_f32() {
    let wide = train(&gpu(), &settings(ZeroStage::Replicated, Precision::F32));
    for stage in [ZeroStage::Replicated, ZeroStage::Parameters] {
        let half = train(&gpu(), &settings(stage, Precision::F16));
        let apart = furthest(&half, &wide);
        // Three steps of 0.01. Each element moves by its own gradient.
        assert!(apart > 0.0 && apart < 0.02, "ZeRO-{stage}: {apart}");
    }
}
