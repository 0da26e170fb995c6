//! Tests the computations that run during collectives: weight gradients and shared experts.

use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;
use burn_megatron_kernels::gradient::Parameter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::references::{backward, gradient};
use super::{leaf, over, part, values, wave};
use crate::collective::{self, Comm};
use crate::comm::{ParallelContext, Pending, World};
use crate::mesh::{Axis, Grid, ParallelConfig};
use crate::nn::moe::{MoeMlpConfig, RouterConfig, SharedExpertsConfig};
use crate::nn::*;
use burn_megatron_comm_testing::Intercept;

/// The events, in order.
pub(super) type Journal = Arc<Mutex<Vec<String>>>;

fn note(journal: &Journal, event: impl Into<String>) {
    journal.lock().unwrap().push(event.into());
}

/// A communicator with slow collectives that records when each begins and ends.
pub(super) fn slow(inner: &Comm, journal: &Journal) -> Comm {
    let journal = journal.clone();
    Intercept::over(inner.clone(), move |inner, call, input| {
        let (journal, name) = (journal.clone(), call.name());
        note(&journal, format!("start {name}"));
        let pending = inner.start(call, input)?;
        Ok(Pending::new(move || {
            sleep(Duration::from_millis(5));
            let result = pending.wait();
            note(&journal, format!("end {name}"));
            result
        }))
    })
}

/// Records the weight gradients that this thread computes, and also its other matmuls if the flag is set.
pub(super) struct Spans(pub Journal, pub bool);

impl Subscriber for Spans {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        match span.metadata().name() {
            "weight_gradient" => note(&self.0, "weight gradient"),
            "product" if self.1 => note(&self.0, "product"),
            _ => {}
        }
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn layer(groups: &ParallelContext, sequence_parallel: bool) -> ColumnParallelLinear {
    let builder = ModelBuilder::with(groups, &super::autodiff(), 7, burn::tensor::DType::F64);
    ColumnParallelLinearConfig::new(6, 8)
        .init(&builder.with_sequence_parallel(sequence_parallel))
        .unwrap()
}

fn input(place: AxisRank, sequence_parallel: bool) -> Tensor<3> {
    let placement = if sequence_parallel {
        Placement::split(1, 4, place.size)
    } else {
        Placement::Replicated
    };
    leaf(part(wave([2, 4, 6], 0.5), &placement, place))
}

/// Creates a second subscriber. With a single subscriber, a span would be disabled for all threads if a thread
/// without a subscriber reached it first.
pub(super) fn second_subscriber() -> tracing::Dispatch {
    tracing::Dispatch::new(Spans(Journal::default(), false))
}

/// Returns the events in the backward pass of a column-parallel layer on each rank, in order.
fn backward_of(sequence_parallel: bool) -> Vec<Vec<String>> {
    let _second = second_subscriber();
    over(2, |groups| {
        let journal = Journal::default();
        let slow = slow(groups.tensor(), &journal);
        let layer = layer(&groups.clone().with_tensor(slow), sequence_parallel);
        let y = layer.forward(input(groups.place(), sequence_parallel));
        journal.lock().unwrap().clear();
        tracing::subscriber::with_default(Spans(journal.clone(), false), || drop(backward(&y)));
        journal
    })
    .iter()
    .map(|journal| journal.lock().unwrap().clone())
    .collect()
}

#[test]
fn a_reduction_is_under_way_while_the_weight_gradient_is_computed() {
    for events in backward_of(false) {
        assert_eq!(
            events,
            ["start all_reduce", "weight gradient", "end all_reduce"]
        );
    }
}

#[test]
fn both_collectives_of_a_split_sequence_are_under_way_together() {
    for events in backward_of(true) {
        assert_eq!(
            events,
            [
                "start all_gather",
                "start reduce_scatter",
                "end all_gather",
                "weight gradient",
                "end reduce_scatter",
            ]
        );
    }
}

#[test]
fn overlap_changes_no_bit() {
    for sequence_parallel in [false, true] {
        over(4, |groups| {
            let layer = layer(&groups, sequence_parallel);
            let results = |forward: &dyn Fn(Tensor<3>) -> Tensor<3>| {
                let x = input(groups.place(), sequence_parallel);
                let y = forward(x.clone());
                let gradients = backward(&y);
                let bias = layer.bias.as_ref().unwrap().val();
                let weight = gradient(&layer.weight.val(), &gradients);
                let bias = gradient(&bias, &gradients);
                [values(y.inner()), gradient(&x, &gradients), weight, bias]
            };
            let overlapped = results(&|x| layer.forward(x));
            let one_by_one = results(&|x| {
                let x = if sequence_parallel {
                    collective::gather_sequence(x, SEQUENCE_DIM, groups.tensor())
                } else {
                    collective::copy(x, groups.tensor())
                };
                let bias = layer.bias.as_ref().map(|bias| bias.val());
                let operands = LinearOperands {
                    bias: bias.map(Parameter::from),
                    ..LinearOperands::new(&layer.weight, InputLayout::Local, true)
                };
                linear(x, operands)
            });
            assert_eq!(
                overlapped, one_by_one,
                "sequence parallel {sequence_parallel}"
            );
        });
    }
}

/// A frozen weight needs no gathered input, and an input without a gradient needs no reduction.
#[test]
fn what_is_not_needed_is_not_communicated() {
    for events in over(2, |groups| {
        let journal = Journal::default();
        let slow = slow(groups.tensor(), &journal);
        let run = |x: Tensor<3>, weight: Tensor<2>| {
            let input = InputLayout::SplitSequence(slow.clone());
            let weight = Param::initialized(ParamId::new(), weight);
            let y = linear(x, LinearOperands::new(&weight, input, true));
            journal.lock().unwrap().clear();
            let _ = backward(&y);
            journal.lock().unwrap().clone()
        };
        let (x, weight) = (wave([2, 4, 6], 0.5), wave([6, 8], 1.0));
        [run(leaf(x.clone()), weight.clone()), run(x, leaf(weight))]
    }) {
        assert_eq!(events[0], ["start reduce_scatter", "end reduce_scatter"]);
        assert_eq!(events[1], ["start all_gather", "end all_gather"]);
    }
}

/// The shared experts gather and reduce-scatter their tokens over the tensor axis.
#[test]
fn shared_experts_run_while_tokens_are_on_their_way() {
    let layout = ParallelConfig::new()
        .with_tensor(2)
        .with_sequence_parallel(true)
        .with_expert(4)
        .with_expert_tensor(1)
        .with_data(2);
    let rank = |rank: crate::comm::Rank| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
        let groups = ParallelContext::from_world(&layout, rank.communicator())?;
        let journal = Journal::default();
        let slow = |inner: Comm| slow(&inner, &journal);
        let [tensor, expert] = [
            groups.tensor().clone(),
            groups.group(Grid::Expert, Axis::Expert)?,
        ];
        let groups = groups.clone().with_tensor(slow(tensor)).with_group(
            Grid::Expert,
            Axis::Expert,
            slow(expert),
        );
        let config = MoeMlpConfig::new(RouterConfig::new(6, 4, 2), 8, Activation::SwiGlu);
        let config = config.with_shared(Some(SharedExpertsConfig::new(8)));
        let builder = ModelBuilder::with(&groups, &super::autodiff(), 7, burn::tensor::DType::F64);
        let moe = config.init(&builder)?;
        let x = input(groups.place(), true);
        journal.lock().unwrap().clear();
        let _ = moe.forward(x);
        Ok(journal.lock().unwrap().clone())
    };
    for events in World::threads(4).unwrap().run(rank).unwrap() {
        let at = |wanted: &str| events.iter().position(|event| event == wanted).unwrap();
        assert_eq!(
            events[at("start all_to_all")..=at("end all_to_all")],
            [
                // Rows and their weights.
                "start all_to_all",
                "start all_to_all",
                "start all_gather",
                "end all_gather",
                "start reduce_scatter",
                "end reduce_scatter",
                "end all_to_all",
            ],
            "{events:?}"
        );
    }
}
