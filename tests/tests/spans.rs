//! Tests that a step emits `tracing` spans.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use burn::tensor::Device;
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron_data::TextData;
use burn_megatron_models::TransformerConfig;
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// Each span as `parent > name`.
#[derive(Clone, Default)]
struct Names(Arc<Mutex<BTreeSet<String>>>);

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Names {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let name = attributes.metadata().name();
        let parent = context
            .span(id)
            .and_then(|span| span.parent().map(|parent| parent.name()));
        self.0
            .lock()
            .unwrap()
            .insert(format!("{} > {name}", parent.unwrap_or("run")));
    }
}

#[test]
fn the_phases_the_collectives_and_the_updates_of_a_step_are_spans() {
    let names = Names::default();
    let subscriber = tracing_subscriber::registry().with(names.clone());
    // With a single subscriber, a thread of another test without a subscriber could reach a span first and disable
    // the span for all threads.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    tracing::subscriber::with_default(subscriber, || {
        let text = TextData::open(env!("CARGO_MANIFEST_DIR").as_ref()).unwrap();
        let layout = ParallelConfig::new().with_tensor(2).with_data(2);
        let run = World::threads(4).unwrap().run(|rank| {
            let groups = ParallelContext::new(&layout, &rank)?;
            let model = TransformerConfig {
                context: 8,
                hidden: 8,
                layers: 1,
                heads: 2,
                ..TransformerConfig::gpt2()
            };
            let device = Device::flex();
            let model = model.init(&groups, &device)?;
            let config = TrainConfig {
                steps: 1,
                warmup_steps: 1,
                ..TrainConfig::default()
            };
            let mut trainer = Trainer::new(model, &groups, &device, &config)?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(
                trainer.fit(&text, &mut NoopObserver)?,
            )
        });
        run.unwrap();
    });
    let names = names.0.lock().unwrap();
    for expected in [
        "run > step",
        "step > forward",
        "forward > collective.start",
        "step > backward",
        "backward > weight_gradient",
        "backward > collective.wait",
        "step > reduce_gradients",
        "reduce_gradients > collective.wait",
        "step > collective.start",
        "step > read_step_statistics",
        "step > gradient_norm",
        "step > optimizer_step",
        "optimizer_step > update",
        "run > evaluate",
    ] {
        assert!(
            names.contains(expected),
            "{expected} is not among {names:#?}"
        );
    }
}
