//! Tests that sharding over the data axis is bit-equal in every ZeRO stage.

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{
    DataParallelConfig, DistributedDataParallel, MemoryPlan, ZeroStage,
};
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW, count_zeros, global_norm};
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::inputs::tokens;
use burn_megatron_tests::tolerance::CLOSE;
use burn_megatron_tests::{small_gpt, small_llama, without_dropout};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const RANKS: usize = 4;
const STEPS: usize = 20;

/// A large epsilon, so that the sign of a gradient that consists only of rounding has no effect.
const EPSILON: f64 = 1e-3;
/// The clipping norm. It is below most norms of the runs, so that gradients are clipped.
const CLIP: f64 = 0.5;

/// The observations of a rank.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    weights: Vec<Vec<u32>>,
    norms: Vec<u64>,
    zeros: Vec<u64>,
}

struct Run {
    seen: Seen,
    peak: MemoryPlan,
    planned: MemoryPlan,
    peak_unsharded_units: u64,
    /// The communication buffers that had been allocated after each step.
    allocated: Vec<u64>,
}

fn train(
    config: &TransformerConfig,
    settings: &DataParallelConfig,
    micro_batches: usize,
    choices: &KernelChoices,
    steps: usize,
) -> Vec<Run> {
    let mesh = ParallelConfig::new().with_data(RANKS);
    let run = |rank| {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let device = Device::flex();
        let scope = ModelBuilder::with(&groups, &device, 3, DType::F32).with_kernels(choices)?;
        let model = config.init_with(scope)?;
        let mut ddp = DistributedDataParallel::with(model, &groups, settings)?;
        let adam = AdamWConfig {
            weight_decay: 0.1,
            epsilon: EPSILON,
            ..AdamWConfig::default()
        };
        let mut optimizer = ParallelAdamW::new(&adam, &ddp)?;
        let mut seen = Seen {
            weights: vec![],
            norms: vec![],
            zeros: vec![],
        };
        let mut allocated = vec![];
        let inputs = device.clone().autodiff();
        for step in 0..steps {
            for micro_batch in 0..micro_batches {
                ddp.position().set(step as u64, (2 * groups.rank()) as u64);
                let key = (step * 10 + groups.rank()) * 10 + micro_batch;
                let batch = |key| tokens(config, key, &inputs);
                let loss = ddp.forward(&device, |model| {
                    model.losses(batch(key), batch(key + 5000)).sum()
                });
                if micro_batch + 1 == micro_batches {
                    ddp.backward_last(loss)
                } else {
                    ddp.backward(loss)
                };
            }
            let mut gradients = ddp.reduce((micro_batches * 2 * config.context) as u64)?;
            let norm = global_norm(&gradients, &ddp)?;
            seen.norms.push(norm.to_bits());
            seen.zeros.push(count_zeros(&gradients, &ddp)?);
            if norm > CLIP {
                gradients.scale(CLIP / norm);
            }
            optimizer.step(0.01, &mut ddp, gradients);
            let pool = groups.data().pool().map(|pool| pool.allocated());
            allocated.push(pool.unwrap_or_default());
        }
        ddp.check_replicas()?;
        let bits = |tensor: Tensor<1>| {
            let values: Vec<f32> = tensor.into_data().try_into_vec().unwrap();
            values.into_iter().map(f32::to_bits).collect()
        };
        seen.weights = ddp.parameters().into_iter().map(bits).collect();
        Ok::<_, AnyError>(Run {
            seen,
            peak: ddp.usage().peak(),
            planned: ddp.memory_plan()?,
            peak_unsharded_units: ddp.usage().peak_unsharded_units(),
            allocated,
        })
    };
    World::threads(RANKS).unwrap().run(run).unwrap()
}

fn stage(stage: u8) -> DataParallelConfig {
    DataParallelConfig {
        zero_stage: ZeroStage::try_from(stage).unwrap(),
        // Several buckets, and parameters that span two shards.
        bucket_size: (stage < 3).then_some(1000),
        ..DataParallelConfig::default()
    }
}

fn ways() -> Vec<(&'static str, DataParallelConfig)> {
    let hsdp = |number| DataParallelConfig {
        hsdp: Some(2),
        ..stage(number)
    };
    let overlap = |number, grads, params| DataParallelConfig {
        overlap_grad_reduce: grads,
        overlap_param_gather: params,
        ..stage(number)
    };
    vec![
        ("ZeRO-1", stage(1)),
        ("ZeRO-2", stage(2)),
        ("ZeRO-3", stage(3)),
        ("ZeRO-1, hybrid 2 x 2", hsdp(1)),
        ("ZeRO-2, hybrid 2 x 2", hsdp(2)),
        ("ZeRO-3, hybrid 2 x 2", hsdp(3)),
        ("ZeRO-0 without overlap", overlap(0, false, false)),
        ("ZeRO-1 without overlap", overlap(1, false, false)),
        ("ZeRO-1 with overlapped gathering", overlap(1, true, true)),
        ("ZeRO-2 with overlapped gathering", overlap(2, true, true)),
        (
            "ZeRO-3 that keeps what it gathers",
            DataParallelConfig {
                keep_gathered: true,
                ..stage(3)
            },
        ),
    ]
}

fn assert_same_bits(name: &str, runs: &[Run], reference: &[Run]) {
    for (rank, run) in runs.iter().enumerate() {
        assert_eq!(
            run.seen.norms, reference[0].seen.norms,
            "{name}: norms of rank {rank}"
        );
        assert_eq!(
            run.seen.zeros, reference[0].seen.zeros,
            "{name}: zeros of rank {rank}"
        );
        for (index, weights) in run.seen.weights.iter().enumerate() {
            let expected = &reference[0].seen.weights[index];
            let differing = weights.iter().zip(expected).filter(|(a, b)| a != b).count();
            assert_eq!(differing, 0, "{name}: parameter {index} of rank {rank}");
        }
    }
}

#[test]
fn every_stage_gives_the_same_bits() {
    let fused = KernelChoices::default();
    for (model, config) in [
        ("GPT, tied", without_dropout(small_gpt()).config),
        ("Llama with dropout", small_llama().config),
    ] {
        let reference = train(&config, &stage(0), 1, &fused, STEPS);
        let clipped = reference[0].seen.norms.iter();
        let clipped = clipped.filter(|norm| f64::from_bits(**norm) > CLIP).count();
        assert!(clipped > STEPS / 2, "{clipped} steps were clipped");
        for (name, settings) in ways() {
            let name = format!("{model}, {name}");
            assert_same_bits(
                &name,
                &train(&config, &settings, 1, &fused, STEPS),
                &reference,
            );
        }
    }
}

#[test]
fn burns_own_optimizer_is_sharded_too() {
    let unfused = KernelChoices::all(KernelChoice::Unfused);
    let config = small_llama().config;
    let reference = train(&config, &stage(0), 1, &unfused, STEPS);
    for number in 1..=3 {
        let runs = train(&config, &stage(number), 1, &unfused, STEPS);
        assert_same_bits(&format!("ZeRO-{number}, unfused"), &runs, &reference);
    }
}

/// From ZeRO-2 on, each micro-batch is reduced over the ranks. ZeRO-0 first sums over the micro-batches, which is a
/// different order of the same sum.
#[test]
fn micro_batches_are_added_in_another_order_from_zero_2_on() {
    let config = small_gpt().config;
    let reference = train(&config, &stage(0), 3, &KernelChoices::default(), STEPS);
    assert_same_bits(
        "ZeRO-1",
        &train(&config, &stage(1), 3, &KernelChoices::default(), STEPS),
        &reference,
    );
    for number in [2, 3] {
        let runs = train(&config, &stage(number), 3, &KernelChoices::default(), STEPS);
        let pairs = runs[0].seen.weights.iter().flatten();
        let pairs = pairs.zip(reference[0].seen.weights.iter().flatten());
        let apart = pairs.map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs());
        let largest = apart.fold(0.0f32, f32::max);
        println!("ZeRO-{number}: {largest:.1e} apart");
        // Adam divides the rounding of a gradient by at most EPSILON.
        assert!(f64::from(largest) < CLOSE, "ZeRO-{number}: {largest}");
    }
}

#[test]
fn a_rank_holds_the_predicted_memory() {
    let config = TransformerConfig {
        hidden: 64,
        layers: 4,
        ..small_llama().config
    };
    for (name, settings) in [("ZeRO-0", stage(0))].into_iter().chain(ways()) {
        for run in train(&config, &settings, 1, &KernelChoices::default(), 2) {
            for (what, measured, planned) in [
                ("parameters", run.peak.parameters, run.planned.parameters),
                ("gradients", run.peak.gradients, run.planned.gradients),
                ("optimizer", run.peak.optimizer, run.planned.optimizer),
            ] {
                let ratio = measured as f64 / planned as f64;
                // In the last micro-batch, a bucket is freed when its shard is summed over the replicas.
                let is_freed = settings.hsdp.is_some() && what == "gradients";
                let least = if is_freed { 0.5 } else { 0.95 };
                assert!(
                    (least..=1.05).contains(&ratio),
                    "{name}, {what}: {measured} of {planned}"
                );
            }
            if !settings.keep_gathered {
                let (measured, planned) = (run.peak.buffers, run.planned.buffers);
                assert!(
                    measured <= planned,
                    "{name}, buffers: {measured} of {planned}"
                );
            }
        }
    }
}

#[test]
fn full_sharding_gathers_two_blocks_at_the_most() {
    let config = TransformerConfig {
        layers: 5,
        ..without_dropout(small_gpt()).config
    };
    for micro_batches in [1, 2] {
        for run in train(
            &config,
            &stage(3),
            micro_batches,
            &KernelChoices::default(),
            3,
        ) {
            assert_eq!(run.peak_unsharded_units, 2);
        }
    }
    let keeping = DataParallelConfig {
        keep_gathered: true,
        ..stage(3)
    };
    for run in train(&config, &keeping, 1, &KernelChoices::default(), 3) {
        assert!(
            run.peak_unsharded_units > 5,
            "{} blocks were kept",
            run.peak_unsharded_units
        );
    }
}

#[test]
fn steps_allocate_no_communication_buffers_after_the_second() {
    // Buffers that are large enough for the pool.
    let config = TransformerConfig {
        hidden: 64,
        ..small_llama().config
    };
    for (name, settings) in [("ZeRO-0", stage(0))].into_iter().chain(ways()) {
        for run in train(&config, &settings, 2, &KernelChoices::default(), 8) {
            let (second, last) = (run.allocated[1], run.allocated[7]);
            assert!(second > 0, "{name}: something is allocated");
            assert_eq!(last, second, "{name}: {:?}", run.allocated);
        }
    }
}
