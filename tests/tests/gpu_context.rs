//! Tests training steps on a device whose ranks share sequences: the results equal one rank on the CPU.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{Engine, ParallelContext, Rank, World};
use burn_megatron::mesh::{ContextExchange, ParallelConfig};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::optim::AdamWConfig;
use burn_megatron_comm_testing::join_as_threads;
use burn_megatron_data::{DataError, Sample, Samples};
use burn_megatron_models::TransformerConfig;
use burn_megatron_test_support::skipped;
use burn_megatron_tests::{gpu, small_llama};
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use burn_megatron_verify::ModelSubject;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The starts of the documents of each sample, repeated in order. `None` uses the documents of the subject, which
/// have three tokens on average.
type Starts = Option<&'static [&'static [usize]]>;

struct Rows {
    samples: ModelSubject<TransformerConfig>,
    starts: Starts,
}

impl Samples for Rows {
    fn seq(&self) -> usize {
        self.samples.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let mut sample = self.samples.sample(number)?;
        if let Some(starts) = self.starts {
            sample.documents = starts[number as usize % starts.len()].to_vec();
        }
        Ok(sample)
    }
}

/// The results of three steps.
struct Trained {
    /// The loss and the gradient norm of each step.
    numbers: Vec<f64>,
    /// The weights after the steps.
    weights: Weights,
}

#[derive(Default)]
struct Weights(Vec<Vec<f32>>);

impl ModuleVisitor for Weights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0
            .push(param.base().into_data().try_into_vec().unwrap());
    }
}

/// Trains three steps of four samples on a rank.
fn train_rank(
    rank: &Rank,
    layout: &ParallelConfig,
    device: &Device,
    starts: Starts,
) -> Result<Trained, AnyError> {
    let config = TransformerConfig {
        context: 16,
        dropout: 0.1,
        ..small_llama().config
    };
    let groups = ParallelContext::new(layout, rank)?;
    let builder = ModelBuilder::with(&groups, device, 3, DType::F32);
    let model = config.init_with(builder)?;
    // A large epsilon limits the effect of rounding in small gradients.
    let adam = AdamWConfig {
        epsilon: 1e-3,
        ..AdamWConfig::default()
    };
    let settings = TrainConfig {
        steps: 3,
        micro_batch_size: if layout.hybrid_context_parallel { 1 } else { 2 },
        global_batch_size: 4,
        warmup_steps: 0,
        optimizer: adam.into(),
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(model, &groups, device, &settings)?;
    let rows = Rows {
        samples: ModelSubject {
            packed: true,
            ..ModelSubject::new(config)
        },
        starts,
    };
    let mut numbers = vec![];
    for _ in 0..settings.steps {
        let metrics = trainer.step(&rows, &mut NoopObserver)?;
        numbers.extend([metrics.loss, metrics.gradient_norm]);
    }
    let mut weights = Weights::default();
    trainer.model().to_module().visit(&mut weights);
    Ok(Trained { numbers, weights })
}

fn train(layout: &ParallelConfig, device: &Device, starts: Starts) -> Trained {
    let world = World::threads(layout.context * layout.data.unwrap()).unwrap();
    let run = |rank| train_rank(&rank, layout, device, starts);
    world.run(run).unwrap().remove(0)
}

fn one_rank() -> ParallelConfig {
    ParallelConfig::new().with_data(1)
}

/// Compares losses and norms relative to their values, and weights relative to the largest weight of their parameter.
#[track_caller]
fn assert_near(what: &str, found: &Trained, expected: &Trained) {
    for (found, expected) in found.numbers.iter().zip(&expected.numbers) {
        let difference = (found - expected).abs() / expected;
        assert!(difference < 1e-3, "{what}: {found} and {expected}");
    }
    let (found, expected) = (&found.weights.0, &expected.weights.0);
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() <= 1e-3 * largest, "{what}: {a} and {b}");
        }
    }
}

#[test]
fn every_exchange_trains_as_one_rank_of_the_cpu() {
    let one = train(&one_rank(), &Device::flex(), None);
    for exchange in [
        ContextExchange::Ring,
        ContextExchange::AllGather,
        ContextExchange::AllToAll,
    ] {
        let layout = one_rank().with_context(2).with_context_exchange(exchange);
        let found = train(&layout, &gpu(), None);
        assert_near(exchange.name(), &found, &one);
    }
}

/// Documents of 1 to 16 tokens. With 4 tokens per rank, a document is on one, two or four ranks.
const DOCUMENTS: &[&[usize]] = &[&[0], &[0, 8, 15], &[0, 1, 3, 5, 9], &[0, 2, 4, 8, 14]];

#[test]
fn documents_on_groups_by_their_length_train_as_on_one_rank_of_the_cpu() {
    let one = train(&one_rank(), &Device::flex(), Some(DOCUMENTS));
    for exchange in [ContextExchange::Ring, ContextExchange::AllGather] {
        let layout = one_rank().with_data(2).with_context(2);
        let layout = layout.with_context_exchange(exchange);
        let layout = layout.with_hybrid_context_parallel(4);
        let found = train(&layout, &gpu(), Some(DOCUMENTS));
        assert_near(exchange.name(), &found, &one);
    }
}

/// The ranks share a device, which NCCL allows with NCCL_MULTI_RANK_GPU_ENABLE.
#[test]
fn documents_on_groups_by_their_length_train_over_nccl() {
    if !cfg!(feature = "cuda") || std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_err() {
        skipped("needs the feature cuda and NCCL_MULTI_RANK_GPU_ENABLE=1");
        return;
    }
    let one = train(&one_rank(), &Device::flex(), Some(DOCUMENTS));
    let layout = one_rank().with_data(2).with_hybrid_context_parallel(8);
    let found = join_as_threads(2, |launch| {
        let world = World::processes(launch).engine(Engine::Nccl);
        let run = |rank| train_rank(&rank, &layout, &gpu(), Some(DOCUMENTS));
        world.run(run).unwrap().remove(0)
    });
    for (rank, found) in found.iter().enumerate() {
        assert_near(&format!("rank {rank}"), found, &one);
    }
}
