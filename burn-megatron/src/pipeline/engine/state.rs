//! The state of the engine between actions: graphs, activations, gradients.

use std::collections::HashMap;

use burn::tensor::{Device, Tensor};

use super::super::schedule::{Action, ActionKind, Schedule};
use super::p2p::P2pCommunicator;
use super::{DeferredWgrad, Stage, StageOutput};
use crate::comm::CommError;
use crate::nn::LossFactor;
use crate::nn::gradient_slot::GradientSlot;
use crate::nn::hook::{Deferred, DeferringSink, with_anchor};

/// A stage and a micro-batch.
type MicroBatchKey = (usize, usize);

/// The autodiff graph of a forward whose backward has not run.
struct StageGraph {
    root: Tensor<1>,
    slot: Option<GradientSlot>,
    input: Option<Tensor<3>>,
}

pub(super) struct EngineState<'a> {
    schedule: &'a Schedule,
    device: &'a Device,
    sink: &'a dyn DeferringSink,
    p2p: P2pCommunicator<'a>,
    graphs: HashMap<MicroBatchKey, StageGraph>,
    /// Weight gradients that an input gradient left for its weight gradient action.
    pending_wgrads: HashMap<MicroBatchKey, Vec<Deferred>>,
    /// By the stage whose input they are.
    activations: HashMap<MicroBatchKey, Tensor<3>>,
    /// By the stage whose output's gradient they are.
    gradients: HashMap<MicroBatchKey, Tensor<3>>,
    losses: Vec<Tensor<1>>,
    peak: usize,
    deferred_wgrad: Option<DeferredWgrad>,
    loss_scale: LossFactor,
    /// Gradients of the weight that is deferred to the cool-down.
    deferred_wgrads: Vec<Deferred>,
}

impl<'a> EngineState<'a> {
    pub fn new(
        schedule: &'a Schedule,
        p2p: P2pCommunicator<'a>,
        device: &'a Device,
        sink: &'a dyn DeferringSink,
        deferred_wgrad: Option<DeferredWgrad>,
        loss_scale: LossFactor,
    ) -> Self {
        Self {
            schedule,
            device,
            sink,
            p2p,
            graphs: HashMap::new(),
            pending_wgrads: HashMap::new(),
            activations: HashMap::new(),
            gradients: HashMap::new(),
            losses: vec![],
            peak: 0,
            deferred_wgrad,
            loss_scale,
            deferred_wgrads: vec![],
        }
    }

    /// The losses of all micro-batches.
    pub fn into_losses(self) -> Vec<Tensor<1>> {
        self.losses
    }

    pub fn peak_activations(&self) -> usize {
        self.peak
    }

    /// Prepares the transfers.
    pub fn begin(&mut self) -> Result<(), CommError> {
        self.p2p.begin()
    }

    pub fn perform(&mut self, action: &Action, model: &impl Stage) -> Result<(), CommError> {
        let key = (action.stage, action.micro_batch);
        match (
            action.kind,
            self.schedule.peer(action),
            action.counterpart(),
        ) {
            // A pair is computed one after the other.
            (ActionKind::Forward | ActionKind::PairedForward, ..) => self.forward(key, model),
            (ActionKind::Backward, ..) => match self.deferred_wgrad {
                Some(deferred_wgrad) if action.stage + 1 == self.schedule.stages() => {
                    self.backward_with_deferred_wgrad(key, model, deferred_wgrad);
                }
                _ => self.backward(key, model),
            },
            (ActionKind::InputGradient, ..) => {
                let deferred = self.backward_without_wgrads(key, model);
                self.pending_wgrads.insert(key, deferred);
            }
            (ActionKind::WeightGradient, ..) => {
                for (index, gradient) in self.pending_wgrads.remove(&key).unwrap_or_default() {
                    self.sink.accumulate_later(index, gradient);
                }
            }
            (ActionKind::SendActivation, Some(to), Some(at)) => {
                let x = expect_present(self.activations.remove(&(at.stage, at.micro_batch)));
                self.p2p.send(to, action, x)?;
            }
            (ActionKind::SendGradient, Some(to), Some(at)) => {
                let x = expect_present(self.gradients.remove(&(at.stage, at.micro_batch)));
                self.p2p.send(to, action, x)?;
            }
            (ActionKind::ReceiveActivation | ActionKind::ReceiveGradient, Some(from), _) => {
                self.p2p.start_receive(from, action)?;
            }
            (ActionKind::ReduceGradients, ..) => self.sink.close_stage(action.stage),
            (_, None, _) | (_, _, None) => {
                unreachable!(
                    "a valid schedule sends to another rank: {}",
                    action.describe()
                )
            }
        }
        Ok(())
    }

    /// Waits for the tensor of a receive that the rank has performed.
    pub fn wait(&mut self, receive: &Action) -> Result<(), CommError> {
        let x = self.p2p.wait(receive)?;
        let key = (receive.stage, receive.micro_batch);
        match receive.kind {
            ActionKind::ReceiveActivation => self.activations.insert(key, x),
            _ => self.gradients.insert(key, x),
        };
        Ok(())
    }

    /// Waits until all sends have completed.
    pub fn finish(&mut self) -> Result<(), CommError> {
        self.p2p.finish()
    }

    /// A backward of the last stage that defers one weight gradient.
    fn backward_with_deferred_wgrad(
        &mut self,
        key: MicroBatchKey,
        model: &impl Stage,
        deferred_wgrad: DeferredWgrad,
    ) {
        for (index, gradient) in self.backward_without_wgrads(key, model) {
            let within_limit =
                deferred_wgrad.limit == 0 || self.deferred_wgrads.len() < deferred_wgrad.limit;
            if index == deferred_wgrad.index && within_limit {
                self.deferred_wgrads.push((index, gradient))
            } else if index == deferred_wgrad.index {
                // Keeps the order of the sum: deferred gradients first.
                self.compute_deferred_wgrads();
                self.sink.accumulate_later(index, gradient);
            } else {
                self.sink.accumulate_later(index, gradient)
            }
        }
    }

    /// Computes the deferred weight gradients, in order.
    pub fn compute_deferred_wgrads(&mut self) {
        for (index, gradient) in self.deferred_wgrads.drain(..) {
            self.sink.accumulate_later(index, gradient);
        }
    }

    fn forward(&mut self, key: MicroBatchKey, model: &impl Stage) {
        let (stage, micro_batch) = key;
        self.sink.begin_stage(stage);
        let device = self.device.clone().autodiff();
        let input = (stage > 0).then(|| {
            let received = expect_present(self.activations.remove(&key));
            Tensor::from_inner(received).require_grad()
        });
        let anchor = Tensor::<1>::zeros([1], &device).require_grad();
        let output = with_anchor(&anchor, || model.forward(stage, micro_batch, input.clone()));
        let (root, slot) = match output {
            StageOutput::Activation(output) => {
                let slot = GradientSlot::default();
                self.activations
                    .insert((stage + 1, micro_batch), output.clone().inner());
                (slot.backward_root(output, anchor), Some(slot))
            }
            StageOutput::Loss(loss) => {
                self.losses.push(loss.clone().inner());
                (self.loss_scale.scale(loss), None)
            }
        };
        self.graphs.insert(key, StageGraph { root, slot, input });
        self.peak = self.peak.max(self.graphs.len() + self.pending_wgrads.len());
    }

    /// A backward that returns the weight gradients instead of computing them.
    fn backward_without_wgrads(&mut self, key: MicroBatchKey, model: &impl Stage) -> Vec<Deferred> {
        let deferring = DeferGuard::new(self.sink);
        self.backward(key, model);
        deferring.0.take_deferred()
    }

    fn backward(&mut self, key: MicroBatchKey, model: &impl Stage) {
        let (stage, micro_batch) = key;
        let StageGraph { root, slot, input } = expect_present(self.graphs.remove(&key));
        if let Some(slot) = slot {
            let gradient = expect_present(self.gradients.remove(&key));
            slot.set(gradient.into_dispatch());
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

/// Weight gradients are deferred until this is dropped, also if a backward panics.
struct DeferGuard<'a>(&'a dyn DeferringSink);

impl<'a> DeferGuard<'a> {
    fn new(sink: &'a dyn DeferringSink) -> Self {
        sink.set_deferring(true);
        Self(sink)
    }
}

impl Drop for DeferGuard<'_> {
    fn drop(&mut self) {
        self.0.set_deferring(false);
    }
}

/// A value that a valid schedule guarantees.
fn expect_present<T>(value: Option<T>) -> T {
    match value {
        Some(value) => value,
        None => unreachable!("a valid schedule computes each tensor before its use"),
    }
}
