//! The state of the engine between actions: graphs, activations and gradients.

use std::collections::HashMap;

use burn::tensor::Tensor;

use super::super::schedule::{Action, ActionKind};
use super::p2p::P2pCommunicator;
use super::{Engine, Stage, StageOutput};
use crate::comm::CommError;
use crate::nn::ScheduleNodes;
use crate::nn::gradient_slot::GradientSlot;
use crate::nn::hook::{Deferred, with_anchor};
use crate::nn::schedule_nodes::{BackwardEnd, BackwardNodes, Cut, LeftWgrads, NodeRun, new_anchor};

/// A stage and a micro-batch.
type MicroBatchKey = (usize, usize);

/// The autodiff graph of a forward whose backward has not run.
struct StageGraph {
    /// The root of the last node.
    root: Tensor<1>,
    /// The cuts between the nodes.
    cuts: Vec<Cut>,
    slot: Option<GradientSlot>,
    input: Option<Tensor<3>>,
}

/// A backward that has started.
struct StageBackward {
    key: MicroBatchKey,
    nodes: BackwardNodes,
    input: Option<Tensor<3>>,
}

pub(super) struct EngineState<'a> {
    engine: &'a Engine<'a>,
    p2p: P2pCommunicator<'a>,
    graphs: HashMap<MicroBatchKey, StageGraph>,
    /// The deferred weight gradients of input gradients whose weight gradient action has not run.
    pending_wgrads: HashMap<MicroBatchKey, Vec<Deferred>>,
    /// Received activations, keyed by the stage whose input they are.
    activations: HashMap<MicroBatchKey, Tensor<3>>,
    /// Received gradients, keyed by the stage whose output gradient they are.
    gradients: HashMap<MicroBatchKey, Tensor<3>>,
    losses: Vec<Tensor<1>>,
    /// Whether this rank has paired actions.
    in_nodes: bool,
    peak: usize,
    /// The gradients of the weight that is deferred to the cool-down.
    deferred_wgrads: Vec<Deferred>,
}

impl<'a> EngineState<'a> {
    pub fn new(engine: &'a Engine<'a>, p2p: P2pCommunicator<'a>) -> Self {
        let mut actions = engine.schedule.actions(p2p.rank()).iter();
        let in_nodes = actions.any(|action| action.kind == ActionKind::PairedForward);
        Self {
            engine,
            p2p,
            graphs: HashMap::new(),
            pending_wgrads: HashMap::new(),
            activations: HashMap::new(),
            gradients: HashMap::new(),
            losses: vec![],
            in_nodes,
            peak: 0,
            deferred_wgrads: vec![],
        }
    }

    /// Returns the losses of all micro-batches.
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
            self.engine.schedule.peer(action),
            action.counterpart(),
        ) {
            (ActionKind::Forward | ActionKind::PairedForward, ..) => {
                self.forward(key, model, None);
            }
            (ActionKind::Backward | ActionKind::InputGradient, ..) => {
                let backward = self.begin_backward(action);
                self.end_backward(backward, action, model);
            }
            (ActionKind::WeightGradient, ..) => {
                for (index, gradient) in self.pending_wgrads.remove(&key).unwrap_or_default() {
                    self.engine.sink.accumulate_later(index, gradient);
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
            (ActionKind::ReduceGradients, ..) => self.engine.sink.close_stage(action.stage),
            (_, None, _) | (_, _, None) => {
                unreachable!(
                    "a valid schedule sends to another rank: {}",
                    action.describe()
                )
            }
        }
        Ok(())
    }

    /// Alternates the forward and the backward of a pair node by node. Returns the times at which the backward
    /// ran.
    pub fn perform_pair(
        &mut self,
        forward: &Action,
        backward: &Action,
        model: &impl Stage,
    ) -> Vec<NodeRun> {
        let mut of_backward = self.begin_backward(backward);
        // Its first exchange is in flight while the first node of the forward runs.
        of_backward.nodes.run_node(true);
        let StageBackward { key, nodes, input } = of_backward;
        let at = (forward.stage, forward.micro_batch);
        let nodes = expect_present(self.forward(at, model, Some(nodes)));
        let of_backward = StageBackward { key, nodes, input };
        self.end_backward(of_backward, backward, model)
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

    /// Computes the deferred weight gradients, in order.
    pub fn compute_deferred_wgrads(&mut self) {
        for (index, gradient) in self.deferred_wgrads.drain(..) {
            self.engine.sink.accumulate_later(index, gradient);
        }
    }

    /// Runs a forward, with a node of the backward `beside` in each of its exchanges. Returns the rest of the
    /// backward.
    fn forward(
        &mut self,
        key: MicroBatchKey,
        model: &impl Stage,
        beside: Option<BackwardNodes>,
    ) -> Option<BackwardNodes> {
        let (stage, micro_batch) = key;
        self.engine.sink.begin_stage(stage);
        let in_graphs = self.graphs.len() + self.pending_wgrads.len() + 1;
        self.peak = self.peak.max(in_graphs + usize::from(beside.is_some()));
        let input = (stage > 0).then(|| {
            let received = expect_present(self.activations.remove(&key));
            Tensor::from_inner(received).require_grad()
        });
        let anchor = new_anchor(&self.engine.device);
        let nodes = ScheduleNodes::new(anchor.clone(), beside);
        let output = with_anchor(&anchor, || {
            if self.in_nodes {
                model.forward_nodes(stage, micro_batch, input.clone(), &nodes)
            } else {
                model.forward(stage, micro_batch, input.clone())
            }
        });
        let (anchor, cuts, beside) = nodes.finish();
        let (root, slot) = match output {
            StageOutput::Activation(output) => {
                let slot = GradientSlot::default();
                self.activations
                    .insert((stage + 1, micro_batch), output.clone().inner());
                (slot.backward_root(output, anchor), Some(slot))
            }
            StageOutput::Loss(loss) => {
                self.losses.push(loss.clone().inner());
                (self.engine.loss_scale.scale(loss), None)
            }
        };
        let graph = StageGraph {
            root,
            cuts,
            slot,
            input,
        };
        self.graphs.insert(key, graph);
        beside
    }

    /// Prepares the backward of an action without running it.
    fn begin_backward(&mut self, action: &Action) -> StageBackward {
        let key = (action.stage, action.micro_batch);
        let StageGraph {
            root,
            cuts,
            slot,
            input,
        } = expect_present(self.graphs.remove(&key));
        if let Some(slot) = slot {
            let gradient = expect_present(self.gradients.remove(&key));
            slot.set(gradient.into_dispatch());
        }
        let leaves = match (action.kind, self.engine.deferred_wgrad) {
            (ActionKind::InputGradient, _) => LeftWgrads::All,
            (_, Some(deferred)) if action.stage + 1 == self.engine.schedule.stages() => {
                LeftWgrads::Of(deferred.index)
            }
            _ => LeftWgrads::None,
        };
        StageBackward {
            key,
            nodes: BackwardNodes::new(root, cuts, self.engine.sink.clone(), leaves),
            input,
        }
    }

    /// Runs the rest of a backward. Returns the times at which it ran.
    fn end_backward(
        &mut self,
        backward: StageBackward,
        action: &Action,
        model: &impl Stage,
    ) -> Vec<NodeRun> {
        let StageBackward { key, nodes, input } = backward;
        let (stage, micro_batch) = key;
        let BackwardEnd {
            mut gradients,
            left,
            runs,
        } = nodes.finish();
        model.after_backward(stage, micro_batch, &mut gradients);
        if let Some(input) = input {
            let gradient = input.grad_remove(&mut gradients);
            let gradient = gradient.unwrap_or_else(|| input.inner().zeros_like());
            self.gradients.insert((stage - 1, micro_batch), gradient);
        }
        match (action.kind, self.engine.deferred_wgrad) {
            (ActionKind::InputGradient, _) => {
                self.pending_wgrads.insert(key, left);
            }
            (_, Some(deferred)) => self.defer_wgrads(left, deferred.limit),
            (_, None) => {}
        }
        runs
    }

    /// Stores gradients of the weight that is deferred to the cool-down.
    fn defer_wgrads(&mut self, left: Vec<Deferred>, limit: usize) {
        for (index, gradient) in left {
            if limit == 0 || self.deferred_wgrads.len() < limit {
                self.deferred_wgrads.push((index, gradient));
            } else {
                // The order of the sum stays the same: deferred gradients come first.
                self.compute_deferred_wgrads();
                self.engine.sink.accumulate_later(index, gradient);
            }
        }
    }
}

/// Returns a value that a valid schedule guarantees.
fn expect_present<T>(value: Option<T>) -> T {
    match value {
        Some(value) => value,
        None => unreachable!("a valid schedule computes each tensor before its use"),
    }
}
