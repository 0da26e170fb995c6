//! What a rank holds between two actions.

use std::collections::HashMap;

use burn::tensor::{Device, Tensor};

use super::super::schedule::{Action, ActionKind, Schedule};
use super::link::Link;
use super::seed::Seed;
use super::{Output, PutOff, Stage};
use crate::collective::Comm;
use crate::comm::CommError;
use crate::nn::door::{Deferred, DeferringSink, with_anchor};

/// A stage and a micro-batch.
type Key = (usize, usize);

/// The graph of a forward whose backward has not come.
struct Graph {
    root: Tensor<1>,
    seed: Option<Seed>,
    input: Option<Tensor<3>>,
}

pub(super) struct State<'a> {
    schedule: &'a Schedule,
    device: &'a Device,
    sink: &'a dyn DeferringSink,
    link: Link<'a>,
    graphs: HashMap<Key, Graph>,
    /// Weight gradients that were put off.
    deferred: HashMap<Key, Vec<Deferred>>,
    /// By the stage that they go into.
    activations: HashMap<Key, Tensor<3>>,
    /// By the stage whose output's gradient they are.
    gradients: HashMap<Key, Tensor<3>>,
    losses: Vec<Tensor<1>>,
    peak: usize,
    put_off: Option<PutOff>,
    /// Gradients of the weight that is put off to the cool-down.
    waiting: Vec<Deferred>,
}

impl<'a> State<'a> {
    pub fn new(
        schedule: &'a Schedule,
        comm: &'a Comm,
        device: &'a Device,
        sink: &'a dyn DeferringSink,
        put_off: Option<PutOff>,
    ) -> Self {
        Self {
            schedule,
            device,
            sink,
            link: Link::new(comm, device),
            graphs: HashMap::new(),
            deferred: HashMap::new(),
            activations: HashMap::new(),
            gradients: HashMap::new(),
            losses: vec![],
            peak: 0,
            put_off,
            waiting: vec![],
        }
    }

    /// The sum of the losses of all micro-batches.
    pub fn loss(&self) -> f64 {
        let losses = self
            .losses
            .iter()
            .map(|loss| loss.clone().into_scalar::<f64>());
        losses.sum()
    }

    pub fn peak_activations(&self) -> usize {
        self.peak
    }

    pub fn perform(&mut self, action: &Action, model: &impl Stage) -> Result<(), CommError> {
        let key = (action.stage, action.micro_batch);
        match (
            action.kind,
            self.schedule.peer(action),
            action.counterpart(),
        ) {
            (ActionKind::Forward, ..) => self.forward(key, model),
            (ActionKind::Backward, ..) => match self.put_off {
                Some(put_off) if action.stage + 1 == self.schedule.stages() => {
                    self.backward_putting_off(key, model, put_off);
                }
                _ => self.backward(key, model),
            },
            (ActionKind::InputGradient, ..) => {
                let deferred = self.backward_deferring(key, model);
                self.deferred.insert(key, deferred);
            }
            (ActionKind::WeightGradient, ..) => {
                for (index, gradient) in self.deferred.remove(&key).unwrap_or_default() {
                    self.sink.accumulate_later(index, gradient);
                }
            }
            (ActionKind::SendActivation, Some(to), Some(at)) => {
                let x = taken(self.activations.remove(&(at.stage, at.micro_batch)));
                self.link.send(to, action, x)?;
            }
            (ActionKind::SendGradient, Some(to), Some(at)) => {
                let x = taken(self.gradients.remove(&(at.stage, at.micro_batch)));
                self.link.send(to, action, x)?;
            }
            (ActionKind::ReceiveActivation, Some(from), Some(sent)) => {
                let x = self.link.receive(from, &sent)?;
                self.activations.insert(key, x);
            }
            (ActionKind::ReceiveGradient, Some(from), Some(sent)) => {
                let x = self.link.receive(from, &sent)?;
                self.gradients.insert(key, x);
            }
            (_, None, _) | (_, _, None) => {
                unreachable!(
                    "a valid schedule sends to another rank: {}",
                    action.describe()
                )
            }
        }
        Ok(())
    }

    /// Waits until everything that was sent has gone.
    pub fn finish(&mut self) -> Result<(), CommError> {
        self.link.finish()
    }

    /// A backward of the last stage that leaves one weight gradient for later.
    fn backward_putting_off(&mut self, key: Key, model: &impl Stage, put_off: PutOff) {
        for (index, gradient) in self.backward_deferring(key, model) {
            let room = put_off.limit == 0 || self.waiting.len() < put_off.limit;
            match index == put_off.index && room {
                true => self.waiting.push((index, gradient)),
                // Sums keep their order: what waits comes first.
                false if index == put_off.index => {
                    self.compute_put_off();
                    self.sink.accumulate_later(index, gradient);
                }
                false => self.sink.accumulate_later(index, gradient),
            }
        }
    }

    /// Computes what was put off, in order.
    pub fn compute_put_off(&mut self) {
        for (index, gradient) in self.waiting.drain(..) {
            self.sink.accumulate_later(index, gradient);
        }
    }

    fn forward(&mut self, key: Key, model: &impl Stage) {
        let (stage, micro_batch) = key;
        self.sink.begin_stage(stage);
        let device = self.device.clone().autodiff();
        let input = (stage > 0).then(|| {
            let received = taken(self.activations.remove(&key));
            Tensor::from_inner(received).require_grad()
        });
        let anchor = Tensor::<1>::zeros([1], &device).require_grad();
        let output = with_anchor(&anchor, || model.forward(stage, micro_batch, input.clone()));
        let (root, seed) = match output {
            Output::Activation(output) => {
                let seed = Seed::default();
                self.activations
                    .insert((stage + 1, micro_batch), output.clone().inner());
                (seed.root(output, anchor), Some(seed))
            }
            Output::Loss(loss) => {
                self.losses.push(loss.clone().inner());
                (loss, None)
            }
        };
        self.graphs.insert(key, Graph { root, seed, input });
        self.peak = self.peak.max(self.graphs.len() + self.deferred.len());
    }

    /// A backward that leaves the weight gradients for later.
    fn backward_deferring(&mut self, key: Key, model: &impl Stage) -> Vec<Deferred> {
        let deferring = Deferring::of(self.sink);
        self.backward(key, model);
        deferring.0.take_deferred()
    }

    fn backward(&mut self, key: Key, model: &impl Stage) {
        let (stage, micro_batch) = key;
        let Graph { root, seed, input } = taken(self.graphs.remove(&key));
        if let Some(seed) = seed {
            seed.put(taken(self.gradients.remove(&key)));
        }
        let mut leaves = root.backward();
        model.after_backward(stage, micro_batch, &mut leaves);
        if let Some(input) = input {
            let gradient = input.grad_remove(&mut leaves);
            let gradient = gradient.unwrap_or_else(|| input.inner().zeros_like());
            self.gradients.insert((stage - 1, micro_batch), gradient);
        }
    }
}

/// Weight gradients are put off as long as this lives, also when a backward unwinds.
struct Deferring<'a>(&'a dyn DeferringSink);

impl<'a> Deferring<'a> {
    fn of(sink: &'a dyn DeferringSink) -> Self {
        sink.set_deferring(true);
        Self(sink)
    }
}

impl Drop for Deferring<'_> {
    fn drop(&mut self) {
        self.0.set_deferring(false);
    }
}

/// What a valid schedule has put there before.
fn taken<T>(value: Option<T>) -> T {
    match value {
        Some(value) => value,
        None => unreachable!("a valid schedule makes each tensor before it is used"),
    }
}
