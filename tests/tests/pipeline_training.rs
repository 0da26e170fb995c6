//! Tests of the training loop with a pipeline.

use std::fs;
use std::path::PathBuf;

use burn::tensor::{DType, Device};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, Precision};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::pipeline::schedule::{Schedule, ScheduleKind};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_data::TextData;
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_generate::GenerateConfig;
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::tolerance::{assert_near, assert_steps_within};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, TrainConfig, Trainer};

/// The relative tolerance of losses and norms in f64.
const ROUNDING: f64 = 1e-12;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Returns the source code of these tests as text.
fn text() -> TextData {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    assert!(fs::metadata(&folder).unwrap().is_dir());
    TextData::open(&folder).unwrap()
}

fn model() -> TransformerConfig {
    TransformerConfig {
        context: 16,
        hidden: 16,
        layers: 4,
        heads: 2,
        groups: Some(1),
        dropout: 0.05,
        tied: true,
        ..TransformerConfig::llama()
    }
}

/// Returns a configuration in f64. For any text, a few steps do not amplify a rounding error to [`ROUNDING`].
fn config(steps: usize) -> TrainConfig {
    TrainConfig {
        data_parallel: DataParallelConfig {
            precision: Precision::F64,
            ..DataParallelConfig::default()
        },
        steps,
        micro_batch_size: 1,
        global_batch_size: 8,
        learning_rate: 1e-2,
        min_learning_rate: 1e-3,
        warmup_steps: 2,
        held_out_samples: 7,
        ..TrainConfig::default()
    }
}

/// The observations of a rank, and the text that its model generates.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seen {
    steps: Vec<StepMetrics>,
    held_out: Vec<HeldOutMetrics>,
    text: String,
}

impl Observer for Seen {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.steps.push(*metrics);
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.held_out.push(*metrics);
        Ok(())
    }
}

/// Trains on two data ranks, and on two pipeline ranks if a schedule is given.
fn train(kind: Option<ScheduleKind>, defer: Option<usize>, steps: usize) -> Vec<Seen> {
    train_in_chunks(kind, defer, steps, 0)
}

/// Trains like [`train`], with chunks of `loss_chunk_size` tokens in the loss. 0 means no chunks.
fn train_in_chunks(
    kind: Option<ScheduleKind>,
    defer: Option<usize>,
    steps: usize,
    chunk_size: usize,
) -> Vec<Seen> {
    let pipeline = if kind.is_some() { 2 } else { 1 };
    let layout = ParallelConfig {
        schedule: kind.map(Into::into),
        defer_embedding_wgrad: defer,
        ..ParallelConfig::new().with_pipeline(pipeline).with_data(2)
    };
    train_in(&layout, steps, chunk_size)
}

fn train_in(layout: &ParallelConfig, steps: usize, chunk_size: usize) -> Vec<Seen> {
    let kernels = KernelChoices {
        loss_chunk_size: Some(chunk_size),
        ..KernelChoices::default()
    };
    let (text, config) = (text(), config(steps));
    let world = World::threads(2 * layout.pipeline).unwrap();
    let run = world.run(|rank| -> Result<_, AnyError> {
        let groups = ParallelContext::new(layout, &rank)?;
        let device = Device::flex();
        let scope = ModelBuilder::with(&groups, &device, 0, DType::F64).with_kernels(&kernels)?;
        let mut trainer = Trainer::new(model().init_with(scope)?, &groups, &device, &config)?;
        let mut seen = Seen::default();
        trainer.fit(&text, &mut seen)?;
        assert!(!trainer.events().is_empty());
        let sample = GenerateConfig {
            prompt: "fn".into(),
            tokens: 24,
            temperature: 0.5,
            ..GenerateConfig::default()
        };
        seen.text = trainer
            .generate(&sample, &Tokenizer::bytes(), &mut |_| Ok(()))?
            .text;
        Ok(seen)
    });
    run.unwrap()
}

#[test]
fn every_schedule_trains_as_no_pipeline_does() {
    let without = train(None, None, 4).swap_remove(0);
    for kind in ScheduleKind::ALL {
        for seen in train(Some(kind), None, 4) {
            let what = kind.to_string();
            assert_steps_within(&what, &without.steps, &seen.steps, ROUNDING);
            assert!(seen.steps.iter().all(|step| !step.skipped), "{kind}");
            let (found, expected) = (seen.held_out[0].loss, without.held_out[0].loss);
            assert_near(&what, found, expected, ROUNDING);
            assert_eq!(without.text, seen.text, "{kind}");
        }
    }
}

#[test]
fn deferring_the_output_weight_gradient_changes_no_bit() {
    let bits = |seen: &[Seen]| format!("{seen:?}");
    let at_once = train(Some(ScheduleKind::OneFOneB), None, 5);
    for limit in [0, 1, 3] {
        let put_off = train(Some(ScheduleKind::OneFOneB), Some(limit), 5);
        assert_eq!(bits(&at_once), bits(&put_off), "limit {limit}");
    }
}

/// Compares losses, evaluations and generated text.
#[test]
fn receives_ahead_change_no_bit() {
    for kind in [
        ScheduleKind::EagerOneFOneB,
        ScheduleKind::Interleaved { group: None },
        ScheduleKind::ZbV,
    ] {
        let seen = |ahead| {
            let layout = ParallelConfig::new().with_pipeline(2).with_data(2);
            let layout = layout.with_schedule(kind).with_receives_ahead(ahead);
            format!("{:?}", train_in(&layout, 3, 0))
        };
        let expected = seen(0);
        for ahead in [1, 4] {
            assert_eq!(seen(ahead), expected, "{kind}, {ahead} ahead");
        }
    }
}

#[test]
fn a_loss_in_chunks_trains_as_one_of_all_tokens() {
    use ScheduleKind::{GPipe, OneFOneB, ZbH1, ZbV};
    let whole = train(None, None, 4).swap_remove(0);
    for kind in [None, Some(GPipe), Some(OneFOneB), Some(ZbH1), Some(ZbV)] {
        for seen in train_in_chunks(kind, None, 4, 11) {
            let what = format!("{kind:?}");
            assert_steps_within(&what, &whole.steps, &seen.steps, ROUNDING);
            let (found, expected) = (seen.held_out[0].loss, whole.held_out[0].loss);
            assert_near(&what, found, expected, ROUNDING);
        }
    }
    let run = |defer| format!("{:?}", train_in_chunks(Some(OneFOneB), defer, 4, 11));
    assert_eq!(run(None), run(Some(1)));
}

/// Stages 0 to 3 are on ranks 0, 1, 3, 2. The tied weight is not on the first and the last rank.
#[test]
fn a_tied_weight_that_is_not_reduced_is_refused() {
    let text = "F 0 0,B 0 0\nF 1 0,B 1 0\nF 3 0,B 3 0\nF 2 0,B 2 0\n";
    let schedule = Schedule::from_csv("crossed", text).unwrap();
    let layout = ParallelConfig::new().with_pipeline(4);
    let run = World::threads(4)
        .unwrap()
        .run(|rank| -> Result<(), AnyError> {
            let groups = ParallelContext::new(&layout, &rank)?;
            let stages = LayerSplit::Even.stages(4, 4)?;
            let own = schedule.stages_of(rank.rank()).into_iter();
            let own: Vec<_> = own.map(|stage| (stage, stages[stage].clone())).collect();
            let scope = ModelBuilder::new(&groups, &Device::flex());
            let model = model().init_stages(scope, &own)?;
            DistributedDataParallel::new(model, &groups)?;
            Ok(())
        });
    let error = run.unwrap_err().to_string();
    assert!(
        error.contains("embedding.weight is tied across the first and the last stage"),
        "{error}"
    );
    assert!(error.contains("is on rank 2 of a pipeline of 4"), "{error}");
}
