//! Tests of 16-bit training with f32 master weights. It learns as in f32, recovers from overflows, and is bit-equal
//! with sharding.

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{
    DataParallelConfig, DistributedDataParallel, MemoryPlan, Moments, Precision, ZeroStage,
};
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::ModelBuilder;
use burn_megatron::optim::{
    AdamWConfig, LossScale, LossScaleConfig, OptimizerError, ParallelAdamW, global_norm,
};
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::inputs::tokens;
use burn_megatron_tests::{Text, small_gpt, small_llama};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, TrainConfig, TrainOutcome, Trainer};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The layout of a run.
#[derive(Clone, Copy)]
struct Layout {
    tensor: usize,
    data: usize,
    pipeline: usize,
}

const FLAT: Layout = Layout {
    tensor: 2,
    data: 2,
    pipeline: 1,
};

fn model() -> TransformerConfig {
    TransformerConfig {
        context: 16,
        hidden: 32,
        layers: 2,
        heads: 2,
        groups: Some(1),
        ..TransformerConfig::llama()
    }
}

fn config(steps: usize, precision: Precision) -> TrainConfig {
    TrainConfig {
        steps,
        micro_batch_size: 2,
        global_batch_size: 8,
        learning_rate: 4e-3,
        min_learning_rate: 4e-4,
        warmup_steps: 4,
        data_parallel: DataParallelConfig {
            precision,
            ..DataParallelConfig::default()
        },
        ..TrainConfig::default()
    }
}

/// The observations of a rank.
#[derive(Default)]
struct Seen {
    steps: Vec<StepMetrics>,
}

impl Observer for Seen {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.steps.push(*metrics);
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

/// The results of a rank.
struct Trained {
    outcome: TrainOutcome,
    steps: Vec<StepMetrics>,
    /// The bits of the parameters, and their types.
    weights: Vec<Vec<u64>>,
    /// The loss scale at the end.
    scale: f64,
}

fn train(layout: Layout, config: &TrainConfig) -> Vec<Trained> {
    let text = Text::new();
    let text = text.open();
    let mesh = ParallelConfig::new()
        .with_tensor(layout.tensor)
        .with_data(layout.data)
        .with_pipeline(layout.pipeline);
    let world = World::threads(layout.tensor * layout.data * layout.pipeline).unwrap();
    let run = world.run(|rank| -> Result<_, AnyError> {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let device = Device::flex();
        let precision = config.data_parallel.precision;
        let scope = ModelBuilder::with(&groups, &device, 1, precision.master())
            .with_compute_dtype(precision.of(precision.master()));
        let mut trainer = Trainer::new(model().init_with(scope)?, &groups, &device, config)?;
        let mut seen = Seen::default();
        let outcome = trainer.fit(&text, &mut seen)?;
        let scale = trainer.scaler().scale();
        trainer.model().check_replicas()?;
        Ok(Trained {
            outcome,
            steps: seen.steps,
            weights: weights(trainer.model()),
            scale,
        })
    });
    run.unwrap()
}

fn weights<M: burn::module::Module>(ddp: &DistributedDataParallel<M>) -> Vec<Vec<u64>> {
    let bits = |tensor: Tensor<1>| {
        let data = tensor.into_data();
        data.iter::<f64>().map(f64::to_bits).collect()
    };
    ddp.parameters().into_iter().map(bits).collect()
}

#[test]
fn sixteen_bits_end_where_thirty_two_do() {
    let pipeline = Layout {
        tensor: 1,
        data: 1,
        pipeline: 2,
    };
    for layout in [FLAT, pipeline] {
        let wide = &train(layout, &config(60, Precision::F32))[0];
        let expected = wide.outcome.held_out.unwrap().loss;
        assert!(expected < 0.5 * wide.steps[0].loss, "it learns: {expected}");
        for precision in [Precision::Bf16, Precision::F16] {
            let scaled = precision == Precision::F16;
            let scale = scaled.then_some(256.0);
            let config = TrainConfig {
                loss_scale: scale.map(LossScale::Constant),
                ..config(60, precision)
            };
            let run = &train(layout, &config)[0];
            let found = run.outcome.held_out.unwrap().loss;
            let apart = (found / expected - 1.0).abs();
            println!("{precision:?}: {apart:.1e} apart");
            assert!(
                apart < 0.005,
                "{precision:?}: {found}, and {expected} in f32"
            );
            assert_eq!(run.outcome.skipped, 0, "{precision:?}");
            // The compute type differs.
            assert_ne!(run.weights, wide.weights, "{precision:?}");
            assert!(run.steps.iter().all(|step| step.loss_scale == scale));
        }
    }
}

#[test]
fn sixty_four_bits_end_where_thirty_two_do() {
    let wide = &train(FLAT, &config(8, Precision::F64))[0];
    let run = &train(FLAT, &config(8, Precision::F32))[0];
    let (found, expected) = (
        run.outcome.held_out.unwrap().loss,
        wide.outcome.held_out.unwrap().loss,
    );
    assert!((found / expected - 1.0).abs() < 1e-5, "{found} {expected}");
    assert_ne!(found, expected);
    // f32 cannot represent most f64 values.
    let is_f32 = |bits: &&u64| f64::from(f64::from_bits(**bits) as f32).to_bits() == **bits;
    let all = wide.weights.iter().flatten();
    assert!(all.clone().filter(is_f32).count() < all.count() / 2);
    assert!(run.weights.iter().flatten().all(|bits| is_f32(&bits)));
    assert!(wide.steps.iter().all(|step| step.loss_scale.is_none()));
}

/// The first f16 gradients are not finite.
#[test]
fn an_overflow_is_skipped_on_all_ranks_and_training_recovers() {
    let initial = 2f64.powi(40);
    let dynamic = LossScaleConfig {
        initial,
        hysteresis: 1,
        ..LossScaleConfig::default()
    };
    let config = TrainConfig {
        loss_scale: Some(LossScale::Dynamic(dynamic)),
        ..config(80, Precision::F16)
    };
    let rates = config.learning_rates().unwrap();
    let runs = train(FLAT, &config);
    for run in &runs {
        assert_eq!(format!("{:?}", run.steps), format!("{:?}", runs[0].steps));
    }
    let Trained {
        outcome,
        steps,
        scale,
        ..
    } = &runs[0];
    let at_first = steps.iter().take_while(|step| step.skipped).count();
    assert!(
        (10..40).contains(&at_first),
        "{at_first} steps were skipped"
    );
    let mut skipped = 0;
    for (number, step) in steps.iter().enumerate() {
        assert!(step.loss.is_finite(), "step {number}");
        assert_eq!(
            step.gradient_norm.is_finite(),
            !step.skipped,
            "step {number}"
        );
        assert_eq!(step.loss_scale, Some(initial * 0.5f64.powi(skipped)));
        // Skipped steps do not advance the learning rate.
        let taken = number - skipped as usize;
        assert_eq!(step.learning_rate, rates.lr(taken), "step {number}");
        skipped += i32::from(step.skipped);
    }
    assert_eq!(outcome.skipped, skipped as usize);
    assert_eq!(*scale, initial * 0.5f64.powi(skipped));
    let (first, last) = (steps[0].loss, outcome.held_out.unwrap().loss);
    assert!(last < 0.5 * first, "it learns after all: {first} to {last}");
}

/// Too many skips fail the run on all ranks, with a hint.
#[test]
fn a_loss_scale_that_always_overflows_fails_the_run() {
    let config = TrainConfig {
        loss_scale: Some(LossScale::Constant(2f64.powi(40))),
        skip_limit: 5.try_into().unwrap(),
        ..config(20, Precision::F16)
    };
    let outcome = std::panic::catch_unwind(|| train(FLAT, &config).len());
    let panic = outcome.unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(
        message.contains("the last 5 steps were all skipped"),
        "{message}"
    );
}

/// The scale is a power of two, so it does not round.
#[test]
fn a_loss_scale_changes_nothing_in_f32() {
    let pipeline = Layout {
        tensor: 1,
        data: 2,
        pipeline: 2,
    };
    for layout in [FLAT, pipeline] {
        let plain = config(8, Precision::F32);
        let scaled = TrainConfig {
            loss_scale: Some(LossScale::Constant(1024.0)),
            ..plain.clone()
        };
        for (plain, scaled) in train(layout, &plain).iter().zip(train(layout, &scaled)) {
            assert_eq!(plain.weights, scaled.weights);
            for (a, b) in plain.steps.iter().zip(&scaled.steps) {
                assert_eq!((a.loss_scale, b.loss_scale), (None, Some(1024.0)));
                assert_eq!(a.loss.to_bits(), b.loss.to_bits());
                assert_eq!(a.gradient_norm.to_bits(), b.gradient_norm.to_bits());
            }
        }
    }
}

const RANKS: usize = 4;
const STEPS: usize = 6;

/// The observations of a rank of [`shard`].
#[derive(Clone, Debug, PartialEq)]
struct Sharded {
    weights: Vec<Vec<u64>>,
    losses: Vec<u64>,
    norms: Vec<u64>,
    memory: [MemoryPlan; 2],
}

/// Trains with only data parallelism and with clipping.
fn shard(
    config: &TransformerConfig,
    settings: &DataParallelConfig,
    kernels: KernelChoice,
) -> Vec<Sharded> {
    let mesh = ParallelConfig::new().with_data(RANKS);
    let run = World::threads(RANKS).unwrap().run(|rank| {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let device = Device::flex();
        let scope = ModelBuilder::with(&groups, &device, 3, DType::F32)
            .with_compute_dtype(settings.precision.of(DType::F32))
            .with_kernels(&KernelChoices::all(kernels))?;
        let model = config.init_with(scope)?;
        let mut ddp = DistributedDataParallel::with(model, &groups, settings)?;
        let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
        let inputs = device.clone().autodiff();
        let (mut losses, mut norms) = (vec![], vec![]);
        for step in 0..STEPS {
            ddp.position().set(step as u64, (2 * groups.rank()) as u64);
            let key = 10 * step + groups.rank();
            let batch = |key| tokens(config, key, &inputs);
            let loss = ddp.forward(&device, |model| {
                model.losses(batch(key), batch(key + 5000)).sum()
            });
            losses.push(loss.clone().into_scalar::<f64>().to_bits());
            ddp.backward_last(loss);
            let mut gradients = ddp.reduce(2 * config.context as u64)?;
            let norm = global_norm(&gradients, &ddp)?;
            norms.push(norm.to_bits());
            gradients.scale((0.5 / norm).min(1.0));
            optimizer.step(0.01, &mut ddp, gradients);
        }
        ddp.check_replicas()?;
        Ok::<_, AnyError>(Sharded {
            weights: weights(&ddp),
            losses,
            norms,
            memory: [ddp.usage().peak(), ddp.memory_plan()?],
        })
    });
    run.unwrap()
}

fn stage(number: u8, precision: Precision) -> DataParallelConfig {
    DataParallelConfig {
        zero_stage: ZeroStage::try_from(number).unwrap(),
        precision,
        // Several buckets, and parameters that span two shards.
        bucket_size: (number < 3).then_some(1000),
        ..DataParallelConfig::default()
    }
}

fn assert_same_bits(name: &str, runs: &[Sharded], reference: &[Sharded]) {
    for (rank, (run, other)) in runs.iter().zip(reference).enumerate() {
        assert_eq!(run.losses, other.losses, "{name}: losses of rank {rank}");
        assert_eq!(run.norms, other.norms, "{name}: norms of rank {rank}");
        assert_eq!(run.weights, other.weights, "{name}: weights of rank {rank}");
    }
}

#[test]
fn every_stage_gives_the_same_bits_in_16_bits() {
    for (model, config) in [
        ("GPT, tied", small_gpt().config),
        ("Llama", small_llama().config),
    ] {
        for precision in [Precision::Bf16, Precision::F16] {
            let reference = shard(&config, &stage(0, precision), KernelChoice::Auto);
            for number in 1..=3 {
                let runs = shard(&config, &stage(number, precision), KernelChoice::Auto);
                let name = format!("{model}, {precision:?}, ZeRO-{number}");
                assert_same_bits(&name, &runs, &reference);
            }
            let hybrid = DataParallelConfig {
                hsdp: Some(2),
                overlap_param_gather: true,
                ..stage(2, precision)
            };
            let runs = shard(&config, &hybrid, KernelChoice::Auto);
            assert_same_bits(
                &format!("{model}, {precision:?}, hybrid"),
                &runs,
                &reference,
            );
        }
    }
}

#[test]
fn reduction_in_16_bits_rounds_alike_in_every_stage() {
    let config = small_llama().config;
    let narrow = |number| DataParallelConfig {
        reduce_in_16_bits: true,
        ..stage(number, Precision::Bf16)
    };
    let reference = shard(&config, &narrow(1), KernelChoice::Auto);
    for number in [2, 3] {
        let runs = shard(&config, &narrow(number), KernelChoice::Auto);
        assert_same_bits(&format!("ZeRO-{number}"), &runs, &reference);
    }
    let wide = shard(&config, &stage(1, Precision::Bf16), KernelChoice::Auto);
    assert_eq!(wide[0].losses[0], reference[0].losses[0]);
    assert_ne!(wide[0].norms[0], reference[0].norms[0], "it is rounded");
    let norm = |run: &Sharded| f64::from_bits(run.norms[0]);
    let apart = (norm(&wide[0]) / norm(&reference[0]) - 1.0).abs();
    println!("rounded norms: {apart:.1e} apart");
    // Rounding to bf16 changes each element by at most half a unit, which is 2^-9 of the element.
    assert!(apart < 0.5f64.powi(9), "{apart}");
}

#[test]
fn a_rank_holds_the_predicted_memory_in_16_bits() {
    let config = TransformerConfig {
        hidden: 64,
        ..small_llama().config
    };
    for moments in [Moments::F32, Moments::Bf16] {
        for number in 0..=3 {
            let settings = DataParallelConfig {
                moments,
                ..stage(number, Precision::Bf16)
            };
            for run in shard(&config, &settings, KernelChoice::Auto) {
                let [peak, plan] = run.memory;
                for (what, measured, planned) in [
                    ("parameters", peak.parameters, plan.parameters),
                    ("gradients", peak.gradients, plan.gradients),
                    ("optimizer", peak.optimizer, plan.optimizer),
                ] {
                    let ratio = measured as f64 / planned as f64;
                    let name = format!("ZeRO-{number}, {moments:?}, {what}");
                    assert!(
                        (0.95..=1.05).contains(&ratio),
                        "{name}: {measured} of {planned}"
                    );
                }
            }
        }
    }
}

#[test]
fn moments_in_16_bits_need_the_fused_optimizer() {
    let mesh = ParallelConfig::new();
    let run = World::threads(1).unwrap().run(|rank| {
        let groups = ParallelContext::new(&mesh, &rank)?;
        let scope = ModelBuilder::new(&groups, &Device::flex())
            .with_kernels(&KernelChoices::all(KernelChoice::Unfused))?;
        let model = small_gpt().config.init_with(scope)?;
        let settings = DataParallelConfig {
            moments: Moments::Bf16,
            ..DataParallelConfig::default()
        };
        let ddp = DistributedDataParallel::with(model, &groups, &settings)?;
        let error = ParallelAdamW::new(&AdamWConfig::default(), &ddp).err();
        Ok::<_, AnyError>(matches!(error, Some(OptimizerError::Moments)))
    });
    assert_eq!(run.unwrap(), [true]);
}
