//! Tests the metrics of a run. The loss is only the cross-entropy, a step without targets is skipped, and divergence
//! is reported with its step.

use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::optim::{LossScale, LossScaleConfig, LossScalerState};
use burn_megatron_data::{DataError, Dataset, IGNORE, Sample, Samples, Sampling};
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_train::metrics::{HeldOutMetrics, SkipReason, StepMetrics, StepTiming};
use burn_megatron_train::{
    NoopObserver, Observer, ObserverError, TrainConfig, TrainError, TrainOutcome, Trainer,
};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const SEQ: usize = 16;
const BATCH: u64 = 8;

/// Overrides the target at a position of a sample.
type Change = fn(u64, usize) -> Option<i32>;

/// Random tokens with changed targets.
#[derive(Clone, Copy)]
struct Random(Change);

impl Samples for Random {
    fn seq(&self) -> usize {
        SEQ
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let token = |at: usize| {
            let mixed = (number * 31 + at as u64 + 7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed >> 40) % 256) as i32
        };
        let target = |at: usize| (self.0)(number, at).unwrap_or_else(|| token(at + 1));
        Ok(Sample {
            tokens: (0..SEQ).map(token).collect(),
            targets: (0..SEQ).map(target).collect(),
            documents: vec![],
            padding: 0,
        })
    }
}

impl Dataset for Random {
    fn describe(&self) -> String {
        "random tokens".into()
    }

    fn fingerprint(&self) -> u64 {
        1
    }

    fn vocabulary(&self) -> usize {
        256
    }

    fn training(&self, _: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(*self))
    }

    fn held_out(&self, _: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        let samples = Random(|_, at| (at == 3).then_some(IGNORE));
        (0..max as u64)
            .map(|number| samples.sample(1000 + number))
            .collect()
    }
}

fn config(steps: usize) -> TrainConfig {
    TrainConfig {
        steps,
        micro_batch_size: 2,
        global_batch_size: BATCH as usize,
        learning_rate: 1e-2,
        min_learning_rate: 1e-3,
        warmup_steps: 2.min(steps),
        held_out_samples: 5,
        ..TrainConfig::default()
    }
}

/// Returns a model with these terms in its loss.
fn model(label_smoothing: f64, z_loss: f64) -> TransformerConfig {
    TransformerConfig {
        context: SEQ,
        hidden: 16,
        layers: 2,
        heads: 2,
        groups: Some(1),
        dropout: 0.05,
        // 256 tokens and some padding.
        vocabulary_divisible_by: 48,
        label_smoothing,
        z_loss,
        ..TransformerConfig::llama()
    }
}

/// The sizes of the axes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    tensor: usize,
    pipeline: usize,
    data: usize,
}

const ONE: Sizes = Sizes {
    tensor: 1,
    pipeline: 1,
    data: 1,
};

/// Runs `run` with the trainer of each rank, and returns the results.
fn on_ranks<T: Send>(
    sizes: Sizes,
    model: &TransformerConfig,
    kernels: KernelChoice,
    config: &TrainConfig,
    run: impl Fn(&mut Trainer<Transformer>) -> Result<T, TrainError> + Sync,
) -> Vec<T> {
    let Sizes {
        tensor,
        pipeline,
        data,
    } = sizes;
    let mesh = ParallelConfig::new()
        .with_tensor(tensor)
        .with_pipeline(pipeline)
        .with_data(data);
    let world = World::threads(tensor * pipeline * data).unwrap();
    let results = world.run(|rank| -> Result<T, AnyError> {
        let (groups, device) = (ParallelContext::new(&mesh, &rank)?, Device::flex());
        let choices = if kernels == KernelChoice::Unfused {
            KernelChoices::all(kernels)
        } else {
            KernelChoices::default()
        };
        let scope = ModelBuilder::with(&groups, &device, 3, DType::F32).with_kernels(&choices)?;
        let mut trainer = Trainer::new(model.init_with(scope)?, &groups, &device, config)?;
        Ok(run(&mut trainer)?)
    });
    results.unwrap()
}

/// Returns the evaluation before the first step, and the step, on every rank.
fn first(
    sizes: Sizes,
    model: &TransformerConfig,
    kernels: KernelChoice,
) -> (StepMetrics, HeldOutMetrics) {
    // The ranks of the data axis have different numbers of targets.
    let data = Random(|number, at| (at as u64 <= number % BATCH).then_some(IGNORE));
    let all = on_ranks(sizes, model, kernels, &config(1), |trainer| {
        let held_out = trainer.evaluate(&data, 0)?;
        Ok((trainer.step(&data, &mut NoopObserver)?, held_out))
    });
    let text = format!("{:?}", all[0]);
    assert!(
        all.iter().all(|other| format!("{other:?}") == text),
        "{sizes:?}"
    );
    all[0]
}

fn near(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance * b.abs().max(1e-3)
}

#[test]
fn the_loss_is_the_cross_entropy_alone_in_every_layout() {
    let one = first(ONE, &model(0.1, 1e-2), KernelChoice::Fused);
    for sizes in [
        ONE,
        Sizes { tensor: 2, ..ONE },
        Sizes { data: 2, ..ONE },
        Sizes { pipeline: 2, ..ONE },
        Sizes {
            tensor: 2,
            pipeline: 2,
            data: 2,
        },
    ] {
        for kernels in [KernelChoice::Fused, KernelChoice::Unfused] {
            let what = format!("{sizes:?}, {kernels:?}");
            let (plain, plain_held_out) = first(sizes, &model(0.0, 0.0), kernels);
            assert_eq!(plain.minimised, Default::default());
            assert_eq!(plain_held_out.minimised, Default::default());
            for (smoothing, z_loss) in [(0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2)] {
                let (step, held_out) = first(sizes, &model(smoothing, z_loss), kernels);
                // The weights are the same, so the loss is bit-equal.
                assert_eq!(step.loss.to_bits(), plain.loss.to_bits(), "{what}");
                assert_eq!(step.bits_per_byte.to_bits(), plain.bits_per_byte.to_bits());
                assert_eq!(held_out.loss.to_bits(), plain_held_out.loss.to_bits());
                // The objective and its gradient differ.
                assert_ne!(step.gradient_norm, plain.gradient_norm, "{what}");
                for (loss, minimised) in [
                    (step.loss, step.minimised),
                    (held_out.loss, held_out.minimised),
                ] {
                    assert_eq!(minimised.label_smoothing.is_some(), smoothing > 0.0);
                    assert_eq!(minimised.z_loss.is_some(), z_loss > 0.0);
                    let terms: f64 = minimised.terms().map(|(_, term)| term).sum();
                    let objective = minimised.objective.unwrap();
                    assert!(near(loss + terms, objective, 1e-6), "{what}: {minimised:?}");
                    // The logits are small. Their log-sum-exp is close to the log-sum-exp of 256 zeros.
                    if let Some(z_loss) = minimised.z_loss {
                        assert!(near(z_loss, 1e-2 * 256f64.ln().powi(2), 0.05), "{z_loss}");
                    }
                }
                if smoothing > 0.0 && z_loss > 0.0 {
                    assert!(near(step.loss, one.0.loss, 1e-5), "{what}");
                    let of = |step: &StepMetrics| {
                        let all = step.minimised;
                        [all.objective, all.label_smoothing, all.z_loss].map(Option::unwrap)
                    };
                    for (a, b) in of(&step).into_iter().zip(of(&one.0)) {
                        // Label smoothing is the small difference of sums of about 6 in f32.
                        assert!((a - b).abs() < 1e-5, "{what}: {a} {b}");
                    }
                }
            }
        }
    }
}

/// Masks every target of step 1.
fn masked_step(number: u64, _: usize) -> Option<i32> {
    (number / BATCH == 1).then_some(IGNORE)
}

fn dynamic() -> LossScale {
    LossScale::Dynamic(LossScaleConfig {
        hysteresis: 1,
        initial: 1024.0,
        ..LossScaleConfig::default()
    })
}

#[test]
fn a_step_without_targets_is_skipped_for_that_reason_and_leaves_the_loss_scale() {
    let sizes = Sizes {
        tensor: 2,
        pipeline: 2,
        data: 2,
    };
    for (sizes, smoothing) in [(ONE, 0.0), (ONE, 0.1), (sizes, 0.1)] {
        let config = TrainConfig {
            loss_scale: Some(dynamic()),
            // An additional skip would end the run.
            skip_limit: std::num::NonZeroU64::MIN,
            ..config(4)
        };
        let model = model(smoothing, 0.0);
        let all = on_ranks(sizes, &model, KernelChoice::Fused, &config, |trainer| {
            let data = Random(masked_step);
            let mut steps = vec![];
            let mut states = vec![];
            let mut held_out = vec![];
            for _ in 0..3 {
                steps.push(trainer.step(&data, &mut NoopObserver)?);
                states.push(trainer.scaler().state());
                held_out.push(trainer.evaluate(&data, 0)?.loss);
            }
            Ok((steps, states, held_out))
        });
        for (steps, states, held_out) in all {
            let reasons: Vec<_> = steps.iter().map(|step| step.skip_reason).collect();
            assert_eq!(reasons, [None, Some(SkipReason::NoTargets), None]);
            assert_eq!((steps[1].tokens, steps[1].skipped), (0, true));
            assert_eq!(steps[1].gradient_norm, 0.0);
            assert!(steps[1].loss.is_nan() && steps[1].minimised.objective.is_none());
            assert!(steps[2].loss.is_finite());
            // The skipped step does not advance the schedule.
            assert_eq!(steps[1].learning_rate, steps[2].learning_rate);
            let good_steps: Vec<_> = states
                .iter()
                .flatten()
                .map(|state| state.good_steps)
                .collect();
            assert_eq!(good_steps, [1, 1, 2]);
            let is_first = |state: &LossScalerState| (state.scale, state.overflows) == (1024.0, 0);
            assert!(states.iter().flatten().all(is_first));
            assert_eq!(held_out[0].to_bits(), held_out[1].to_bits());
            assert_ne!(held_out[1].to_bits(), held_out[2].to_bits());
        }
    }
}

/// The ranks of the data axis share the samples in order. The first rank has no sample with targets.
#[test]
fn a_rank_without_targets_gives_nothing_to_a_step_that_others_take() {
    let masked = Random(|number, _| (number % BATCH < BATCH / 2).then_some(IGNORE));
    let steps = |data| {
        let sizes = Sizes { data, ..ONE };
        on_ranks(
            sizes,
            &model(0.1, 1e-3),
            KernelChoice::Fused,
            &config(3),
            |trainer| {
                (0..3)
                    .map(|_| trainer.step(&masked, &mut NoopObserver))
                    .collect::<Result<Vec<_>, _>>()
            },
        )
    };
    let one = &steps(1)[0];
    for other in steps(2) {
        for (a, b) in one.iter().zip(&other) {
            assert_eq!((b.skip_reason, b.tokens), (None, BATCH * SEQ as u64 / 2));
            assert!(near(b.loss, a.loss, 1e-5), "{a:?} {b:?}");
            assert!(near(b.gradient_norm, a.gradient_norm, 1e-4), "{a:?} {b:?}");
            let objective = |step: &StepMetrics| step.minimised.objective.unwrap();
            assert!(near(objective(b), objective(a), 1e-5), "{a:?} {b:?}");
        }
    }
}

/// The steps of all warnings, from their field `step`.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<u64>>>);

impl<S: tracing::Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Step<'a>(&'a mut Vec<u64>);
        impl tracing::field::Visit for Step<'_> {
            fn record_debug(&mut self, _: &tracing::field::Field, _: &dyn std::fmt::Debug) {}

            fn record_u64(&mut self, field: &tracing::field::Field, value: u64) {
                if field.name() == "step" {
                    self.0.push(value);
                }
            }
        }
        if *event.metadata().level() == tracing::Level::WARN {
            event.record(&mut Step(&mut self.0.lock().unwrap()));
        }
    }
}

/// Returns invalid targets, which have the loss NaN, in steps 2 and 4 and from step 6 on, on all ranks.
fn wrong_targets(number: u64, at: usize) -> Option<i32> {
    let step = number / BATCH;
    (at == 5 && (step == 2 || step == 4 || step >= 6)).then_some(100_000)
}

#[test]
fn a_run_that_diverges_names_the_step_and_warns_once_for_each() {
    let warnings = Warnings::default();
    let sizes = Sizes {
        tensor: 2,
        data: 2,
        ..ONE
    };
    let fit = |config: &TrainConfig| -> Vec<Result<TrainOutcome, String>> {
        on_ranks(
            sizes,
            &model(0.0, 0.0),
            KernelChoice::Fused,
            config,
            |trainer| {
                let outcome = trainer.fit(&Random(wrong_targets), &mut NoopObserver);
                Ok(outcome.map_err(|error| error.to_string()))
            },
        )
    };
    let subscriber = tracing_subscriber::registry().with(warnings.clone());
    let outcomes = tracing::subscriber::with_default(subscriber, || fit(&config(9)));
    for outcome in outcomes {
        let outcome = outcome.unwrap();
        assert_eq!((outcome.skipped, outcome.diverged), (5, Some(7)));
        // The weights are the weights before these steps.
        assert!(outcome.has_diverged() && outcome.held_out.unwrap().loss.is_finite());
    }
    let mut steps = warnings.0.lock().unwrap().clone();
    steps.sort_unstable();
    assert_eq!(steps, [3, 5, 7, 8, 9]);

    for outcome in fit(&config(6)) {
        let outcome = outcome.unwrap();
        assert_eq!((outcome.skipped, outcome.diverged), (2, None));
        assert!(!outcome.has_diverged());
    }
    let limited = TrainConfig {
        skip_limit: 3.try_into().unwrap(),
        ..config(20)
    };
    for outcome in fit(&limited) {
        let error = outcome.unwrap_err();
        let says = "training diverged at step 7, from which on no loss is finite: the last 3 steps were all \
                    skipped, after 4 that were taken";
        assert!(error.starts_with(says), "{error}");
    }
}

/// With full sharding, every rank takes part in an evaluation.
#[test]
fn a_run_without_held_out_samples_evaluates_nothing() {
    let sizes = Sizes { data: 2, ..ONE };
    let mut config = TrainConfig {
        evaluate_every: Some(1),
        held_out_samples: 0,
        ..config(2)
    };
    config.data_parallel.zero_stage = ZeroStage::Parameters;
    let data = Random(|_, _| None);
    let outcomes = on_ranks(
        sizes,
        &model(0.0, 0.0),
        KernelChoice::Fused,
        &config,
        |trainer| {
            let mut seen = Evaluations(0);
            let outcome = trainer.fit(&data, &mut seen)?;
            assert_eq!((seen.0, trainer.evaluate(&data, 2)?.tokens), (0, 0));
            Ok(outcome)
        },
    );
    for outcome in outcomes {
        assert_eq!((outcome.steps, outcome.held_out), (2, None));
        assert!(!outcome.has_diverged());
    }
}

/// Counts evaluations.
struct Evaluations(usize);

impl Observer for Evaluations {
    fn step(&mut self, _: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.0 += 1;
        Ok(())
    }
}
