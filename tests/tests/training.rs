//! Tests that the training loop learns, is reproducible, skips steps and stops.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_megatron::comm::{ParallelContext, Rank, World};
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::RecomputePrefix;
use burn_megatron::model::{LanguageModel, ModelConfig, Tokens};
use burn_megatron::nn::Losses;
use burn_megatron::nn::{ModelBuilder, ParallelModule};
use burn_megatron::optim::LossScale;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::GenerateConfig;
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_tests::Text;
use burn_megatron_tests::tolerance::{CLOSE, assert_near, assert_steps_near};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{
    NoopObserver, Observer, ObserverError, StepGradients, TrainConfig, TrainOutcome, Trainer,
};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

fn model() -> TransformerConfig {
    TransformerConfig {
        context: 16,
        hidden: 16,
        layers: 1,
        heads: 2,
        groups: Some(1),
        dropout: 0.05,
        ..TransformerConfig::llama()
    }
}

fn config(steps: usize) -> TrainConfig {
    TrainConfig {
        steps,
        micro_batch_size: 2,
        global_batch_size: 8,
        learning_rate: 1e-2,
        min_learning_rate: 1e-3,
        warmup_steps: 2.min(steps),
        held_out_samples: 7,
        ..TrainConfig::default()
    }
}

/// Records its calls, and stops after `stop_after` steps.
#[derive(Default)]
struct Seen {
    steps: Vec<StepMetrics>,
    held_out: Vec<HeldOutMetrics>,
    stop_after: Option<usize>,
}

impl Observer for Seen {
    fn step(&mut self, metrics: &StepMetrics, timing: &StepTiming) -> Result<(), ObserverError> {
        assert!(timing.tokens_per_second > 0.0 && timing.flops_per_second > 0.0);
        self.steps.push(*metrics);
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.held_out.push(*metrics);
        Ok(())
    }

    fn stop(&self) -> bool {
        self.stop_after
            .is_some_and(|steps| self.steps.len() >= steps)
    }
}

fn ranks<T: Send>(
    tensor: usize,
    data: usize,
    run: impl Fn(&Rank, &ParallelContext) -> Result<T, AnyError> + Sync,
) -> Vec<T> {
    let layout = ParallelConfig::new().with_tensor(tensor).with_data(data);
    let world = World::threads(tensor * data).unwrap();
    world
        .run(|rank| run(&rank, &ParallelContext::new(&layout, &rank)?))
        .unwrap()
}

fn scope(groups: &ParallelContext, seed: u64) -> ModelBuilder {
    ModelBuilder::with(groups, &Device::flex(), seed, DType::F32)
}

/// Trains, and returns the observations of each rank and some generated text.
fn train(tensor: usize, data: usize, config: &TrainConfig) -> Vec<(TrainOutcome, Seen, Vec<u32>)> {
    let text = Text::new();
    let text = text.open();
    ranks(tensor, data, |_, groups| {
        let device = Device::flex();
        let model = model().init_with(scope(groups, config.seed))?;
        let mut trainer = Trainer::new(model, groups, &device, config)?;
        let mut seen = Seen::default();
        let outcome = trainer.fit(&text, &mut seen)?;
        let sample = GenerateConfig {
            prompt: "fn".into(),
            tokens: 24,
            temperature: 0.5,
            ..GenerateConfig::default()
        };
        let sample = trainer.generate(&sample, &Tokenizer::bytes(), &mut |_| Ok(()))?;
        Ok((outcome, seen, sample.tokens))
    })
}

fn lines(seen: &Seen) -> (String, String) {
    // `Debug` prints the shortest text that parses to the same bits.
    (format!("{:?}", seen.steps), format!("{:?}", seen.held_out))
}

#[test]
fn two_runs_of_one_layout_are_bit_equal_and_ranks_see_the_same() {
    let mut config = config(6);
    config.evaluate_every = Some(2);
    let first = train(2, 2, &config);
    let second = train(2, 2, &config);
    assert_eq!(first[0].1.held_out.len(), 3);
    for (one, other) in first.iter().zip(&second) {
        assert_eq!(lines(&one.1), lines(&first[0].1));
        assert_eq!(lines(&one.1), lines(&other.1));
        assert_eq!(one.2, other.2);
    }
    config.seed += 1;
    assert_ne!(lines(&train(2, 2, &config)[0].1), lines(&first[0].1));
}

#[test]
fn layouts_agree_in_f32_and_write_the_same_text() {
    let config = config(5);
    let one = &train(1, 1, &config)[0];
    for (tensor, data) in [(2, 1), (1, 2), (2, 2)] {
        for (outcome, seen, text) in train(tensor, data, &config) {
            let what = format!("tp{tensor}-dp{data}");
            assert_steps_near(&what, &one.1.steps, &seen.steps);
            let (found, expected) = (outcome.held_out.unwrap().loss, one.0.held_out.unwrap().loss);
            assert_near(&what, found, expected, CLOSE);
            assert_eq!(outcome.held_out.unwrap().tokens, 7 * 16);
            assert_eq!(one.2, text);
        }
    }
}

/// The numbers of held-out samples differ between ranks.
#[test]
fn full_sharding_trains_evaluates_and_writes_the_same() {
    let mut config = TrainConfig {
        global_batch_size: 4,
        held_out_samples: 5,
        evaluate_every: Some(2),
        ..config(5)
    };
    let whole = train(2, 2, &config);
    config.data_parallel.zero_stage = ZeroStage::Parameters;
    for (one, other) in whole.iter().zip(train(2, 2, &config)) {
        assert_eq!(lines(&one.1), lines(&other.1));
        assert_eq!(one.0, other.0);
        assert_eq!(one.2, other.2);
    }
}

/// Both stages reduce each micro-batch over the ranks.
#[test]
fn micro_batches_are_added_alike_from_zero_2_on() {
    let run = |stage, bucket_size| {
        let mut config = config(4);
        config.data_parallel.zero_stage = stage;
        config.data_parallel.bucket_size = bucket_size;
        train(1, 2, &config)
    };
    let two = run(ZeroStage::Gradients, Some(1000));
    for (one, other) in two.iter().zip(run(ZeroStage::Parameters, None)) {
        assert_eq!(lines(&one.1), lines(&other.1));
    }
}

#[test]
fn it_learns() {
    let (outcome, seen, _) = train(2, 1, &config(60)).swap_remove(0);
    assert!(seen.steps[0].loss > 5.0, "{}", seen.steps[0].loss);
    assert!(
        outcome.held_out.unwrap().loss < 2.5,
        "{}",
        outcome.held_out.unwrap().loss
    );
    let bits = outcome.held_out.unwrap().loss / std::f64::consts::LN_2;
    assert!((outcome.held_out.unwrap().bits_per_byte - bits).abs() < 1e-12);
}

#[test]
fn one_rank_that_stops_stops_all() {
    let text = Text::new();
    let text = text.open();
    let outcomes = ranks(1, 3, |rank, groups| {
        let device = Device::flex();
        let config = TrainConfig {
            global_batch_size: 6,
            ..config(50)
        };
        let model = model().init_with(scope(groups, 1))?;
        let stop_after = (rank.rank() == 2).then_some(4);
        let mut seen = Seen {
            stop_after,
            ..Seen::default()
        };
        Ok(Trainer::new(model, groups, &device, &config)?.fit(&text, &mut seen)?)
    });
    assert!(
        outcomes
            .iter()
            .all(|outcome| outcome.stopped && outcome.steps == 4)
    );
}

/// Compares the gradients that `gradients` receives with the metrics of the step.
#[derive(Default)]
struct GradientNorms {
    /// The gradient norm of each step, and the norm of the gathered gradients.
    norms: Vec<(f64, f64)>,
}

impl Observer for GradientNorms {
    fn gradients(&mut self, gradients: &StepGradients<'_>) -> Result<(), ObserverError> {
        assert_eq!(gradients.step, self.norms.len() + 1);
        let full = gradients.full();
        let entries = gradients.table.entries();
        assert_eq!(full.len(), entries.len());
        let mut squares = 0.0;
        for (gradient, entry) in full.into_iter().zip(entries) {
            assert_eq!(gradient.dims(), [entry.len()], "{}", entry.path);
            squares += gradient.powi_scalar(2).sum().into_scalar::<f64>();
        }
        self.norms.push((gradients.norm(), squares.sqrt()));
        Ok(())
    }

    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        let (norm, gathered) = self.norms[metrics.step - 1];
        assert_eq!(norm, metrics.gradient_norm);
        assert_near("norm", gathered, norm, CLOSE);
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

#[test]
fn an_observer_sees_the_gradients_before_they_are_clipped() {
    let text = Text::new();
    let text = text.open();
    for zero_stage in [ZeroStage::Replicated, ZeroStage::Gradients] {
        let norms = ranks(1, 2, |_, groups| {
            let device = Device::flex();
            let mut config = TrainConfig {
                clip: 1e-3,
                loss_scale: Some(LossScale::Constant(1024.0)),
                ..config(3)
            };
            config.data_parallel.zero_stage = zero_stage;
            let scope = ModelBuilder::with(groups, &device, 1, DType::F32);
            let model = model().init_with(scope)?;
            let mut seen = GradientNorms::default();
            Trainer::new(model, groups, &device, &config)?.fit(&text, &mut seen)?;
            Ok(seen.norms)
        });
        assert!(norms.iter().all(|norms| norms.len() == 3));
        assert!(norms.iter().flatten().all(|(norm, _)| *norm > 0.1));
    }
}

/// A model whose losses are not finite in one training call.
#[derive(Module, Debug)]
struct Poisoned {
    inner: Transformer,
    #[module(skip)]
    calls: Calls,
    #[module(skip)]
    poisoned_call: Option<usize>,
    #[module(skip)]
    value: f32,
}

#[derive(Clone, Debug, Default)]
struct Calls(std::sync::Arc<AtomicUsize>);

impl LanguageModel for Poisoned {
    type Cache = RecomputePrefix;

    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        self.inner.hidden(stage, input, tokens)
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }

    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        let mut losses = self.inner.losses_of(hidden, targets);
        if !losses.objective.is_autodiff() {
            return losses;
        }
        if self.poisoned_call == Some(self.calls.0.fetch_add(1, Ordering::Relaxed)) {
            losses.objective = losses.objective * self.value;
        }
        losses
    }

    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        self.inner.logits_of(hidden)
    }

    fn output_weight(&self) -> Option<&str> {
        self.inner.output_weight()
    }

    fn context(&self) -> usize {
        self.inner.context()
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        self.inner.flops_per_token(seq)
    }
}

#[test]
fn no_rank_takes_a_step_with_a_loss_that_is_not_finite_on_one() {
    let text = Text::new();
    let text = text.open();
    let config = config(3);
    for value in [f32::NAN, f32::INFINITY] {
        let results = ranks(2, 2, |_, groups| {
            let device = Device::flex();
            let model = model().init(groups, &device)?;
            // Two micro-batches per step: call 3 is the second micro-batch of step 1. Both ranks of the tensor group
            // have it, since their losses are the same.
            let poisoned_call = (groups.data().rank() == 1).then_some(3);
            let model = poisoned(model, poisoned_call, value);
            let mut trainer = Trainer::new(model, groups, &device, &config)?;
            let sampler = text.samples(16, config.seed)?;
            let mut steps = vec![trainer.step(&sampler, &mut NoopObserver)?];
            let before = trainer.evaluate(&text, 1)?.loss;
            steps.push(trainer.step(&sampler, &mut NoopObserver)?);
            let after = trainer.evaluate(&text, 1)?.loss;
            steps.push(trainer.step(&sampler, &mut NoopObserver)?);
            let last = trainer.evaluate(&text, 2)?.loss;
            Ok((steps, [before, after, last]))
        });
        for (steps, [before, after, last]) in results {
            let skipped: Vec<_> = steps.iter().map(|step| step.skipped).collect();
            assert_eq!(skipped, [false, true, false]);
            assert!(!steps[1].loss.is_finite() && steps[2].loss.is_finite());
            assert_eq!(before.to_bits(), after.to_bits());
            assert_ne!(after.to_bits(), last.to_bits());
        }
    }
}

fn poisoned(
    model: ParallelModule<Transformer>,
    poisoned_call: Option<usize>,
    value: f32,
) -> ParallelModule<Poisoned> {
    let ParallelModule {
        module: inner,
        mut table,
        position,
        kernels,
        fp8,
        recompute,
        routers,
        lora,
        attention_logits,
    } = model;
    for entry in table.entries_mut() {
        entry.path = format!("inner.{}", entry.path);
    }
    let module = Poisoned {
        inner,
        calls: Calls::default(),
        poisoned_call,
        value,
    };
    ParallelModule {
        module,
        table,
        position,
        kernels,
        fp8,
        recompute,
        routers,
        lora,
        attention_logits,
    }
}
