//! Walks over a recording and builds the profiles of the stages.

use std::collections::HashSet;
use std::slice;

use burn_ir::{OperationIr, TensorIr};
use burn_megatron_kernels::record::{RecordedStep, Recording};

use super::measure::{axes_of, measure};
use super::operations::{name, reusable, rule};
use super::stage::{LayerName, Node, NodeBackward, Stage};
use super::storage::{Holder, Storage, Storages, bytes_of};
use super::{Repeat, StageNote, StateNote, note};
use crate::profile::{Exchange, LayerProfile, SavedTensor, StageProfile, TrainingPass};
use burn_megatron::collective::ExchangeNote;
use burn_megatron::mesh::Mesh;
use burn_megatron::model::LayerNote;
use burn_megatron::nn::OffloadNote;

/// Functions whose second input is a weight. A pipeline schedule may defer the gradient of this weight.
const DEFER_WEIGHT_GRADIENTS: [&str; 3] = ["LinearFunction", "GroupedMatmul", "ExpertProduct"];

pub(super) struct Walk<'a> {
    recording: &'a Recording,
    mesh: &'a Mesh,
    storages: Storages,
    /// The number of storages that outlive a step: parameters and their gradients. Their indices are smaller than this
    /// number.
    state: usize,
    /// Storages of the training state that were created later: flat gradient buffers.
    later_state: HashSet<Storage>,
    /// Whether the next operation creates a storage of the training state.
    makes_state: bool,
    /// Whether the next operation creates the input of the stage.
    takes_input: bool,
    stage: Option<Stage>,
    pass: TrainingPass,
    /// The calls that enclose the current step.
    inside: Vec<usize>,
    /// The repetitions in the stages that follow.
    repeats: slice::Iter<'a, Repeat>,
    pub finished: Vec<StageProfile>,
}

impl<'a> Walk<'a> {
    pub fn new(recording: &'a Recording, mesh: &'a Mesh, repeats: &'a [Repeat]) -> Self {
        Self {
            recording,
            mesh,
            storages: Storages::default(),
            state: 0,
            later_state: HashSet::new(),
            makes_state: false,
            takes_input: false,
            stage: None,
            pass: TrainingPass::Forward,
            inside: vec![],
            repeats: repeats.iter(),
            finished: vec![],
        }
    }

    pub fn step(&mut self, step: &RecordedStep) {
        if let Some(stage) = note::<StageNote>(step) {
            self.enter_stage(*stage);
            return;
        }
        if let Some(LayerNote(number)) = note(step) {
            if self.pass == TrainingPass::Forward {
                self.enter_layer(LayerName::Layer(*number));
            }
            return;
        }
        if note::<StateNote>(step).is_some() {
            self.makes_state = true;
            return;
        }
        if note::<OffloadNote>(step).is_some() {
            if let Some(stage) = &mut self.stage {
                stage.is_offloadable = true;
            }
            return;
        }
        if let Some(exchange) = note::<ExchangeNote>(step) {
            self.exchange(exchange);
            return;
        }
        match step {
            RecordedStep::Operation(operation) => self.operation(operation),
            RecordedStep::Forward(call) => self.inside.push(*call),
            RecordedStep::ForwardEnd(call) => {
                self.inside.pop();
                if self.inside.is_empty() {
                    self.end_forward(*call);
                }
            }
            RecordedStep::Backward(call) => {
                if self.inside.is_empty() {
                    self.begin_backward(*call);
                }
                self.inside.push(*call);
            }
            RecordedStep::BackwardEnd(call) => {
                self.inside.pop();
                if self.inside.is_empty() {
                    self.end_backward(*call);
                }
            }
            RecordedStep::Note(_) => {}
        }
    }

    fn enter_stage(&mut self, note: StageNote) {
        match note {
            StageNote::Forward => {
                self.state = self.storages.len();
                self.pass = TrainingPass::Forward;
                self.stage = Some(Stage::default());
                self.enter_layer(LayerName::Embedding);
            }
            StageNote::Input => {
                self.takes_input = true;
            }
            StageNote::Output => self.enter_layer(LayerName::Output),
            StageNote::Backward => {
                self.pass = TrainingPass::Backward;
                if let Some(stage) = &mut self.stage {
                    stage.forward_end = stage.liveness.now;
                    stage.backward = vec![None; stage.layers.len()];
                }
            }
            StageNote::End => {
                while self.next_rule() {}
                if let Some(mut stage) = self.stage.take() {
                    stage.liveness.now += 1;
                    if let Some(input) = stage.input {
                        stage.liveness.touch(input);
                    }
                    let repeat = self.repeats.next().copied().unwrap_or_default();
                    let profile = stage.profile(&self.storages, repeat);
                    self.finished.push(profile);
                }
            }
        }
    }

    fn enter_layer(&mut self, name: LayerName) {
        // A run of layers starts at its first layer.
        if let Some(stage) = &mut self.stage
            && stage.names.last() != Some(&name)
        {
            stage.names.push(name);
            stage.layers.push(LayerProfile::default());
            stage.forward.push(stage.liveness.now);
            stage.deferred_bytes.push(0);
        }
    }

    fn operation(&mut self, operation: &OperationIr) {
        if std::mem::take(&mut self.makes_state) {
            let made = self.storages.enter(operation, |_| Holder::Graph);
            self.later_state.extend(made);
            return;
        }
        // Operations before the forward of a stage.
        let Some(stage) = &mut self.stage else {
            self.storages.enter(operation, |_| Holder::Graph);
            return;
        };
        stage.liveness.now += 1;
        let is_gradient = matches!(operation, OperationIr::Custom(it) if it.id == "gradient");
        if is_gradient && self.aliases_gradient(operation) {
            return;
        }
        let Some(stage) = &mut self.stage else {
            return;
        };
        let is_plain = self.pass == TrainingPass::Forward && self.inside.is_empty();
        let rule = is_plain
            .then(|| rule(operation, |it| stage.tracked.contains(&it.id)))
            .flatten();
        let saved = rule.iter().flat_map(|rule| &rule.saved);
        let is_input = |tensor: &&TensorIr| operation.inputs().any(|it| it.id == tensor.id);
        let saved = saved.filter(is_input).map(|it| self.storages.of(it));
        let saved: Vec<_> = saved.collect();
        let made = self.storages.enter(operation, |it| {
            if self.later_state.contains(&it) {
                Holder::State
            } else if it < self.state || stage.holds(it) || saved.contains(&it) {
                Holder::Graph
            } else {
                Holder::Tensors
            }
        });
        for storage in &made {
            stage.liveness.make(*storage);
        }
        for tensor in operation.inputs() {
            stage.liveness.touch(self.storages.of(tensor));
        }
        if self.pass == TrainingPass::Backward {
            return;
        }
        let layer = stage.layers.len() - 1;
        if std::mem::take(&mut self.takes_input) {
            for out in operation.outputs() {
                stage.take_input(out, self.storages.of(out));
            }
            return;
        }
        let writes = |out| !reusable(operation, out).is_empty();
        let streams = !made.is_empty() || operation.outputs().any(writes);
        measure(&mut stage.layers[layer], operation, streams);
        if !self.inside.is_empty() {
            return;
        }
        let Some(rule) = rule else {
            return;
        };
        let mut saved: Vec<_> = rule.saved.iter().map(|it| self.storages.of(it)).collect();
        for bytes in &rule.inner {
            let inner = self.storages.make_unnamed(*bytes);
            stage.liveness.make(inner);
            saved.push(inner);
        }
        stage.held_by_rules.extend(&saved);
        let outputs: Vec<_> = operation.outputs().cloned().collect();
        stage.tracked.extend(outputs.iter().map(|it| it.id));
        let backward = NodeBackward::Rule(rule, saved);
        self.add_node(name(operation), outputs, backward);
    }

    fn end_forward(&mut self, call: usize) {
        let recorded = &self.recording.calls[call];
        let Some(stage) = &mut self.stage else {
            return;
        };
        if self.pass == TrainingPass::Backward {
            return;
        }
        // All inputs are constants if a forward enters the graph, for example through the anchor of a lookup.
        stage
            .tracked
            .extend(recorded.outputs.iter().map(|it| it.id));
        let saved = recorded.saved.iter().map(|it| self.storages.of(it));
        let saved: Vec<_> = saved.collect();
        if std::mem::take(&mut stage.is_offloadable) {
            let layer = stage.layers.len() - 1;
            stage
                .offloadable
                .extend(saved.iter().map(|it| (layer, *it)));
        }
        let backward = NodeBackward::Call(call, saved);
        self.add_node(recorded.name.clone(), recorded.outputs.clone(), backward);
    }

    fn add_node(&mut self, name: String, outputs: Vec<TensorIr>, backward: NodeBackward) {
        let Some(stage) = &mut self.stage else {
            return;
        };
        let layer = stage.layers.len() - 1;
        let (NodeBackward::Call(_, saved) | NodeBackward::Rule(_, saved)) = &backward;
        for storage in saved {
            if *storage < self.state {
                continue;
            }
            let times = stage.saved.entry(*storage).or_default();
            *times += 1;
            if *times == 1 {
                stage.layers[layer].saved.push(SavedTensor {
                    name: name.clone(),
                    bytes: self.storages.bytes(*storage),
                });
            }
        }
        if let Some(last) = outputs.last() {
            stage.layers[layer].output_bytes = bytes_of(last);
        }
        stage.nodes.push(Node {
            layer,
            outputs,
            backward,
        });
    }

    /// Runs the backward of the operations of Burn that come after this call in the forward.
    fn begin_backward(&mut self, call: usize) {
        while self.stage.as_ref().is_some_and(|stage| {
            let last = stage.nodes.last().map(|node| &node.backward);
            matches!(last, Some(NodeBackward::Rule(..)))
        }) {
            self.next_rule();
        }
        let Some(stage) = &mut self.stage else {
            return;
        };
        let of = stage.nodes.last().map(|node| (&node.backward, node.layer));
        if let Some((NodeBackward::Call(last, _), layer)) = of {
            debug_assert_eq!(*last, call, "calls run backward in reverse");
            stage.extend_backward(layer);
        }
    }

    /// Runs the backward of the last node if the node has a rule. Returns whether it has.
    fn next_rule(&mut self) -> bool {
        let Some(stage) = &mut self.stage else {
            return false;
        };
        let is_rule = |node: &mut Node| matches!(node.backward, NodeBackward::Rule(..));
        let Some(node) = stage.nodes.pop_if(is_rule) else {
            return false;
        };
        let NodeBackward::Rule(rule, saved) = node.backward else {
            return false;
        };
        let held = stage.held_by_rules.len() - saved.len();
        stage.held_by_rules.truncate(held);
        stage.liveness.now += 1;
        stage.extend_backward(node.layer);
        let first = node
            .outputs
            .first()
            .and_then(|out| stage.gradients.remove(&out.id));
        for input in &rule.inputs {
            let shares = !rule.made.iter().any(|made| made.id == input.id);
            let storage = match first.filter(|_| shares) {
                Some(storage) => storage,
                None => {
                    let made = self.storages.make_unnamed(bytes_of(input));
                    stage.liveness.make(made);
                    made
                }
            };
            stage.add_gradient(input.id, storage);
        }
        for storage in saved.into_iter().chain(first) {
            stage.liveness.touch(storage);
        }
        stage.extend_backward(node.layer);
        true
    }

    fn end_backward(&mut self, call: usize) {
        let recorded = &self.recording.calls[call];
        let Some(stage) = &mut self.stage else {
            return;
        };
        stage.liveness.now += 1;
        let Some(Node {
            layer,
            backward: NodeBackward::Call(_, saved),
            ..
        }) = stage.nodes.pop()
        else {
            return;
        };
        for storage in saved.into_iter().chain(stage.taken.drain(..)) {
            stage.liveness.touch(storage);
        }
        if DEFER_WEIGHT_GRADIENTS.contains(&&*recorded.name) {
            let weight = recorded
                .inputs
                .get(1)
                .map(|weight| self.storages.of(weight));
            let gradients = recorded.gradients.iter().flat_map(|it| &it.outputs);
            for tensor in recorded.saved.iter().chain(gradients) {
                let storage = self.storages.of(tensor);
                if Some(storage) != weight && stage.deferred.insert(storage) {
                    stage.deferred_bytes[layer] += self.storages.bytes(storage);
                }
            }
        }
        for out in &recorded.outputs {
            if let Some(gradient) = stage.gradients.remove(&out.id) {
                stage.liveness.touch(gradient);
            }
        }
        let gradients = recorded.gradients.iter().flat_map(|it| &it.inputs);
        for (input, gradient) in recorded.inputs.iter().zip(gradients) {
            if let Some(gradient) = gradient
                .as_ref()
                .filter(|_| stage.tracked.contains(&input.id))
            {
                let storage = self.storages.of(gradient);
                stage.liveness.touch(storage);
                stage.add_gradient(input.id, storage);
            }
        }
        stage.extend_backward(layer);
    }

    /// Maps the gradient of an output to the storage that the backward of another call created. Returns whether there
    /// is such a storage.
    fn aliases_gradient(&mut self, operation: &OperationIr) -> bool {
        let (Some(call), Some(stage)) = (self.inside.first(), &mut self.stage) else {
            return false;
        };
        let recorded = &self.recording.calls[*call];
        let gradients = recorded.gradients.iter().flat_map(|it| &it.outputs);
        for out in operation.outputs() {
            let place = gradients.clone().position(|it| it.id == out.id);
            let known = place.and_then(|place| stage.gradients.remove(&recorded.outputs[place].id));
            let Some(storage) = known else {
                return false;
            };
            self.storages.alias(out, storage);
            stage.taken.push(storage);
        }
        true
    }

    fn exchange(&mut self, note: &ExchangeNote) {
        let (grid, axes, part) = axes_of(&note.ranks, self.mesh);
        let Some(stage) = &mut self.stage else {
            return;
        };
        let layer = match self.pass {
            TrainingPass::Forward => stage.layers.len() - 1,
            TrainingPass::Backward => stage.nodes.last().map_or(0, |node| node.layer),
        };
        stage.layers[layer].exchanges.push(Exchange {
            kind: note.kind,
            grid,
            axes,
            part,
            ranks: note.ranks.len() as u64,
            bytes: note.bytes,
            pass: self.pass,
        });
    }
}
