//! Training steps on a device whose ranks share sequences: the same as on one rank of the CPU.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::mesh::{ContextExchange, ParallelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::train::{ModelConfig, NoopObserver, TrainConfig, Trainer};
use burn_megatron::verify::ModelSubject;
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::{gpu, small_llama};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The losses and the gradient norms of three steps, with several documents in each row.
fn train(layout: &ParallelConfig, device: &Device) -> Vec<f64> {
    let config = TransformerConfig {
        context: 16,
        dropout: 0.1,
        ..small_llama().config
    };
    let run = |rank| {
        let groups = ParallelContext::new(layout, &rank)?;
        let builder = ModelBuilder::with(&groups, device, 3, DType::F32);
        let model = config.init_with(builder)?;
        let settings = TrainConfig {
            steps: 3,
            micro_batch_size: 2,
            global_batch_size: 4,
            warmup_steps: 0,
            ..TrainConfig::default()
        };
        let mut trainer = Trainer::new(model, &groups, device, &settings)?;
        let samples = ModelSubject {
            packed: true,
            ..ModelSubject::new(config.clone())
        };
        let mut numbers = vec![];
        for _ in 0..settings.steps {
            let metrics = trainer.step(&samples, &mut NoopObserver)?;
            numbers.extend([metrics.loss, metrics.gradient_norm]);
        }
        Ok::<_, AnyError>(numbers)
    };
    let world = World::threads(layout.context).unwrap();
    world.run(run).unwrap().remove(0)
}

#[test]
fn every_exchange_trains_as_one_rank_of_the_cpu() {
    let one = train(&ParallelConfig::new().with_data(1), &Device::flex());
    for exchange in [
        ContextExchange::Ring,
        ContextExchange::AllGather,
        ContextExchange::AllToAll,
    ] {
        let layout = ParallelConfig::new()
            .with_data(1)
            .with_context(2)
            .with_context_exchange(exchange);
        let found = train(&layout, &gpu());
        for (found, expected) in found.iter().zip(&one) {
            let difference = (found - expected).abs() / expected;
            assert!(difference < 1e-3, "{exchange}: {found} and {expected}");
        }
    }
}
