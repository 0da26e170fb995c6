//! The training loop over a pipeline.

use std::fs;
use std::path::PathBuf;

use burn::tensor::Device;
use burn_megatron::comm::{Groups, World};
use burn_megatron::data::TextData;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::Scope;
use burn_megatron::pipeline::schedule::{Schedule, ScheduleConfig, ScheduleKind, generate};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron::tokenizer::Tokenizer;
use burn_megatron::train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron::train::{
    GenerateConfig, Observer, ObserverError, Pipeline, TrainConfig, Trainer,
};
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::near::{CLOSE, assert_near, assert_steps_near};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The folder of the source of these tests: some text.
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

fn config(steps: usize) -> TrainConfig {
    TrainConfig {
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

/// What a rank saw, and the text of its model.
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

/// Trains over two data ranks, and two pipeline ranks where a schedule is given.
fn train(kind: Option<ScheduleKind>, defer: Option<usize>, steps: usize) -> Vec<Seen> {
    let (text, config) = (text(), config(steps));
    let pipeline = if kind.is_some() { 2 } else { 1 };
    let layout = ParallelConfig::new().with_pipeline(pipeline).with_data(2);
    let world = World::threads(2 * pipeline).unwrap();
    let run = world.run(|rank| -> Result<_, AnyError> {
        let groups = Groups::new(&layout, &rank)?;
        let device = Device::flex();
        let scope = Scope::new(&groups, &device);
        let mut trainer = match kind {
            None => Trainer::new(model().init(scope, false)?, &groups, &device, &config)?,
            Some(kind) => {
                let schedule = generate(&ScheduleConfig::new(kind, 2, 4))?;
                let stages = LayerSplit::Even.stages(4, schedule.stages())?;
                let own = schedule.stages_of(groups.pipeline().rank()).into_iter();
                let own: Vec<_> = own.map(|stage| (stage, stages[stage].clone())).collect();
                let model = model().init_stages(scope, false, &own)?;
                let pipeline = Pipeline {
                    schedule,
                    defer_embedding_wgrad: defer,
                };
                Trainer::with_pipeline(model, &groups, &device, &config, pipeline)?
            }
        };
        let mut seen = Seen::default();
        trainer.fit(&text, &mut seen)?;
        assert_eq!(trainer.events().is_empty(), kind.is_none());
        let sample = GenerateConfig {
            prompt: "fn".into(),
            tokens: 24,
            temperature: 0.5,
            ..GenerateConfig::default()
        };
        seen.text = trainer.generate(&sample, &Tokenizer::bytes())?.text;
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
            assert_steps_near(&what, &without.steps, &seen.steps);
            assert!(seen.steps.iter().all(|step| !step.skipped), "{kind}");
            let (found, expected) = (seen.held_out[0].loss, without.held_out[0].loss);
            assert_near(&what, found, expected, CLOSE);
            assert_eq!(without.text, seen.text, "{kind}");
        }
    }
}

#[test]
fn putting_off_the_output_weight_changes_no_bit() {
    let bits = |seen: &[Seen]| format!("{seen:?}");
    let at_once = train(Some(ScheduleKind::OneFOneB), None, 5);
    for limit in [0, 1, 3] {
        let put_off = train(Some(ScheduleKind::OneFOneB), Some(limit), 5);
        assert_eq!(bits(&at_once), bits(&put_off), "limit {limit}");
    }
}

/// Stages 0 to 3 on ranks 0, 1, 3, 2: the tied weight of the last stage is out of reach.
#[test]
fn a_tied_weight_that_no_sum_reaches_is_refused() {
    let text = "F 0 0,B 0 0\nF 1 0,B 1 0\nF 3 0,B 3 0\nF 2 0,B 2 0\n";
    let schedule = Schedule::from_csv("crossed", text).unwrap();
    let layout = ParallelConfig::new().with_pipeline(4);
    let run = World::threads(4)
        .unwrap()
        .run(|rank| -> Result<(), AnyError> {
            let groups = Groups::new(&layout, &rank)?;
            let stages = LayerSplit::Even.stages(4, 4)?;
            let own = schedule.stages_of(rank.rank()).into_iter();
            let own: Vec<_> = own.map(|stage| (stage, stages[stage].clone())).collect();
            let model = model().init_stages(Scope::new(&groups, &Device::flex()), false, &own)?;
            DistributedDataParallel::new(model, &groups)?;
            Ok(())
        });
    let error = run.unwrap_err().to_string();
    assert!(
        error.contains("embedding.weight is shared by the first and the last stage"),
        "{error}"
    );
    assert!(
        error.contains("lies on rank 2 of a pipeline of 4"),
        "{error}"
    );
}
