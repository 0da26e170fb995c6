//! Tests the order of calls and products in a pair of a forward and a backward pass, and which transfers overlap with
//! which computations.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device};
use burn_megatron::comm::{Communicator, ParallelContext, Pending, Rank, World};
use burn_megatron::mesh::{Axis, AxisSet, Grid, ParallelConfig};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::nn::moe::DispatcherKind;
use burn_megatron_comm_testing::Intercept;
use burn_megatron_data::TextData;
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event as TracingEvent, Metadata, Subscriber};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// The start of a call, with its number.
    Start(usize, &'static str),
    End(usize),
    Product,
    WeightGradient,
    /// A part of the backward pass of a pair.
    Backward,
    BackwardDone,
    Pair,
    PairDone,
}

/// The events of a rank, in order.
type Journal = Arc<Mutex<Vec<Event>>>;

/// Records the calls of a rank.
fn recording(inner: Arc<dyn Communicator>, journal: Journal) -> Arc<dyn Communicator> {
    Intercept::over(inner, move |inner, call, input| {
        let journal = journal.clone();
        let number = {
            let mut events = journal.lock().unwrap();
            let number = events.len();
            events.push(Event::Start(number, call.name()));
            number
        };
        let pending = inner.start(call, input)?;
        Ok(Pending::new(move || {
            journal.lock().unwrap().push(Event::End(number));
            pending.wait()
        }))
    })
}

/// Records the products of a thread, and its pairs with the parts of their backward passes.
struct Spans(Journal);

const BACKWARD: u64 = 1;
const PAIR: u64 = 2;
const OTHER: u64 = 3;

impl Spans {
    fn note(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl Subscriber for Spans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let names = ["product", "weight_gradient", "backward_node", "pair"];
        names.contains(&metadata.name())
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        Id::from_u64(match span.metadata().name() {
            "backward_node" => BACKWARD,
            "pair" => PAIR,
            name => {
                self.note(if name == "product" {
                    Event::Product
                } else {
                    Event::WeightGradient
                });
                OTHER
            }
        })
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &TracingEvent<'_>) {}
    fn enter(&self, span: &Id) {
        match span.into_u64() {
            BACKWARD => self.note(Event::Backward),
            PAIR => self.note(Event::Pair),
            _ => {}
        }
    }
    fn exit(&self, span: &Id) {
        match span.into_u64() {
            BACKWARD => self.note(Event::BackwardDone),
            PAIR => self.note(Event::PairDone),
            _ => {}
        }
    }
}

/// Returns the events of the first of two ranks in a step of three micro-batches.
fn events(dispatcher: DispatcherKind) -> Result<Vec<Event>, AnyError> {
    let layout = ParallelConfig::new()
        .with_data(2)
        .with_expert(2)
        .with_overlap_moe_expert_parallel_comm(true);
    let model = TransformerConfig {
        context: 16,
        hidden: 16,
        layers: LAYERS,
        heads: 2,
        groups: None,
        dropout: 0.0,
        moe: Some(MoeConfig {
            experts: 4,
            expert_width: Some(8),
            dispatcher,
            ..MoeConfig::default()
        }),
        ..TransformerConfig::mixtral()
    };
    let config = TrainConfig {
        steps: 1,
        warmup_steps: 0,
        held_out_samples: 1,
        micro_batch_size: 1,
        global_batch_size: 2 * 3,
        ..TrainConfig::default()
    };
    let text = TextData::open(Path::new(env!("CARGO_MANIFEST_DIR")))?;
    let rank = |rank: Rank| -> Result<_, AnyError> {
        let journal = Journal::default();
        let mut groups = ParallelContext::new(&layout, &rank)?;
        // A group that has both roles is recorded once.
        let axes = [
            AxisSet::from([Axis::Expert, Axis::ExpertTensor]),
            Axis::Expert.into(),
        ];
        let inner = axes.map(|axes| groups.group(Grid::Expert, axes));
        for (axes, inner) in axes.into_iter().zip(inner) {
            let recording = recording(inner?, journal.clone());
            groups = groups.with_group(Grid::Expert, axes, recording);
        }
        let device = Device::flex();
        let model = model.init_with(ModelBuilder::with(&groups, &device, 0, DType::F32))?;
        let mut trainer = Trainer::new(model, &groups, &device, &config)?;
        journal.lock().unwrap().clear();
        tracing::subscriber::with_default(Spans(journal.clone()), || {
            trainer.fit(&text, &mut NoopObserver)
        })?;
        let events = journal.lock().unwrap().clone();
        Ok(events)
    };
    Ok(World::threads(2)?.run(rank)?.swap_remove(0))
}

const LAYERS: usize = 3;

/// Returns the events of backward passes between two positions.
fn in_backward(events: &[Event], from: usize, to: usize) -> Vec<Event> {
    let mut inside = false;
    let mut found = vec![];
    for (at, event) in events[..to].iter().enumerate() {
        match event {
            Event::Backward => inside = true,
            Event::BackwardDone => inside = false,
            Event::Product | Event::WeightGradient if inside && at > from => found.push(*event),
            _ => {}
        }
    }
    found
}

/// Exchanges of row counts overlap with the backward pass of the other micro-batch. In the first layer they overlap
/// with the input gradients of its experts. In other layers they overlap with the weight gradient that the previous
/// node has deferred. Exchanges of rows overlap with weight gradients.
#[test]
fn counts_and_rows_travel_under_the_backward_of_the_other_micro_batch() {
    // With a single subscriber, a thread of another test without a subscriber could reach a span first and disable
    // the span for all threads.
    let _second = tracing::Dispatch::new(Spans(Journal::default()));
    for dispatcher in [DispatcherKind::AllToAll, DispatcherKind::Flex] {
        let events = events(dispatcher).unwrap();
        let at = |event: Event| events.iter().position(|other| *other == event).unwrap();
        let pairs = events.split(|event| *event == Event::Pair).skip(1);
        let pairs = pairs.map(|pair| {
            let end = pair.iter().position(|event| *event == Event::PairDone);
            &pair[..end.unwrap()]
        });
        let mut count = 0;
        for pair in pairs {
            count += 1;
            let starts = |name: &'static str| {
                pair.iter().filter_map(move |event| match event {
                    Event::Start(number, op) if *op == name => Some(*number),
                    _ => None,
                })
            };
            let counts: Vec<_> = starts("all_gather").collect();
            assert_eq!(counts.len(), LAYERS, "{dispatcher:?}");
            for (layer, number) in counts.into_iter().enumerate() {
                let arrived = at(Event::End(number));
                let under = in_backward(&events, number, arrived);
                let what = format!("{dispatcher:?}, layer {layer}");
                let expected = match layer {
                    // The input gradients of both products of the experts.
                    0 => vec![Event::Product; 2],
                    _ => vec![Event::WeightGradient],
                };
                assert_eq!(under, expected, "{what}: counts");
                let sent = starts("all_to_all").find(|rows| *rows > arrived).unwrap();
                let calls = starts("all_to_all").filter(|rows| *rows >= sent);
                let first_end = calls.map(|rows| at(Event::End(rows))).min().unwrap();
                let under = in_backward(&events, sent, first_end);
                assert!(
                    under.contains(&Event::WeightGradient),
                    "{what}: rows under {under:?}"
                );
            }
        }
        assert_eq!(count, 2, "{dispatcher:?}");
    }
}
