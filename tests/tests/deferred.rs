//! Tests deferred readings: reading the results of each step one step later changes nothing in a run.

use std::sync::{Arc, Mutex};

use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::Precision;
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron_models::MoeConfig;
use burn_megatron_tests::overflows::{
    RunReport, RunSettings, assert_overflows, overflowing, train,
};
use burn_megatron_tests::{Text, small_llama};
use burn_megatron_train::{TrainConfig, TrainError, Trainer};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// The messages about invalid gradients with their steps, and the number of readings.
#[derive(Clone, Default)]
struct Listener(Arc<Mutex<(Vec<String>, usize)>>);

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Listener {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        if attributes.metadata().name() == "read_step_statistics" {
            self.0.lock().unwrap().1 += 1;
        }
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = Fields::default();
        event.record(&mut text);
        if text.0.contains("the gradient of ") {
            self.0.lock().unwrap().0.push(text.0);
        }
    }
}

/// All fields of an event.
#[derive(Default)]
struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0 += &format!("{field}: {value:?} ");
    }
}

/// Returns a run, the sorted messages about its gradients, and the number of readings.
fn heard(
    layout: &str,
    settings: RunSettings,
    text: &Text,
    defers: bool,
) -> (RunReport, Vec<String>, usize) {
    let listener = Listener::default();
    let subscriber = tracing_subscriber::registry().with(listener.clone());
    // With a single subscriber, a thread of another test without a subscriber could reach a span first and disable
    // the span for all threads.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    let run = || train(&Device::flex(), layout, settings, &text.open(), defers);
    let report = tracing::subscriber::with_default(subscriber, run);
    let (mut messages, readings) = std::mem::take(&mut *listener.0.lock().unwrap());
    messages.sort();
    (report, messages, readings)
}

fn assert_same(layout: &str, config: &TrainConfig, text: &Text) {
    assert_same_with(layout, (config, &Fp8Config::default(), None), text);
}

fn assert_same_with(layout: &str, settings: RunSettings, text: &Text) {
    let (at_once, named, readings) = heard(layout, settings, text, false);
    let (deferred, named_later, readings_later) = heard(layout, settings, text, true);
    assert_overflows(&at_once, layout);
    assert_eq!(at_once.ranks, deferred.ranks, "{layout}");
    let names = |run: &RunReport| run.files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&at_once), names(&deferred), "{layout}");
    for (path, bytes) in &at_once.files {
        assert!(
            deferred.files[path] == *bytes,
            "{layout}: {}",
            path.display()
        );
    }
    assert!(!named.is_empty(), "{layout}: no gradient was named");
    assert_eq!(named, named_later, "{layout}");
    // One reading per step and rank.
    let ranks = at_once.ranks.len();
    assert_eq!([readings, readings_later], [20 * ranks; 2], "{layout}");
}

#[test]
fn overflows_on_one_rank() {
    let text = Text::new();
    assert_same(
        "tp1-mb2",
        &overflowing(Precision::F16, 2f64.powi(26)),
        &text,
    );
}

#[test]
fn overflows_under_every_zero_stage() {
    let text = Text::new();
    let config = overflowing(Precision::F16, 2f64.powi(26));
    for stage in 0..4 {
        assert_same(&format!("dp2-mb2-z{stage}"), &config, &text);
    }
}

#[test]
fn overflows_in_pipelines_and_tensor_groups() {
    let text = Text::new();
    let config = overflowing(Precision::F16, 2f64.powi(26));
    assert_same("tp2-sp-dp2-mb2", &config, &text);
    assert_same("pp2-dp2-mb1-z1/1f1b", &config, &text);
}

/// The checkpoints contain the scales and the amax histories.
#[test]
fn overflows_with_delayed_scales() {
    let text = Text::new();
    let config = overflowing(Precision::F16, 2f64.powi(26));
    let fp8 = Fp8Config {
        recipe: Some("delayed".parse().unwrap()),
        ..Fp8Config::default()
    };
    for layout in ["tp1-mb2", "tp2-sp-dp2-mb2-z1"] {
        assert_same_with(layout, (&config, &fp8, None), &text);
    }
}

/// The checkpoints contain the expert biases. A skipped step does not change them.
#[test]
fn overflows_with_expert_biases() {
    let text = Text::new();
    let config = overflowing(Precision::F16, 2f64.powi(26));
    let moe = MoeConfig {
        experts: 4,
        expert_width: Some(16),
        score: ScoreFunction::Sigmoid,
        bias_update_rate: Some(0.01),
        ..MoeConfig::default()
    };
    for layout in ["tp1-mb2", "tp1-ep2-pp2-dp2-mb2-z1/1f1b"] {
        let settings = (&config, &Fp8Config::default(), Some(&moe));
        assert_same_with(layout, settings, &text);
    }
}

#[test]
fn readings_of_an_unfused_optimizer_are_not_deferred() {
    let (device, groups) = (Device::flex(), ParallelContext::single());
    let kernels = KernelChoices::all(KernelChoice::Unfused);
    let scope = ModelBuilder::new(&groups, &device)
        .with_kernels(&kernels)
        .unwrap();
    let model = small_llama().config.init_with(scope).unwrap();
    let mut trainer = Trainer::new(model, &groups, &device, &TrainConfig::default()).unwrap();
    trainer.defer_readings(false).unwrap();
    let refused = trainer.defer_readings(true).unwrap_err();
    assert!(matches!(refused, TrainError::Unfused), "{refused}");
}
