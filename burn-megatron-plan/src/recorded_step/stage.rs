//! The data that is collected for one stage.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use burn_ir::{TensorId, TensorIr};

use super::operations::Rule;
use super::repeat::Repeat;
use super::storage::{Storage, Storages, bytes_of};
use crate::profile::{BlockInput, LayerProfile, SavedTensor, StageProfile};

/// An operation of the forward that has a backward.
pub(super) struct Node {
    pub layer: usize,
    pub outputs: Vec<TensorIr>,
    pub backward: NodeBackward,
}

pub(super) enum NodeBackward {
    /// A recorded call, and the storages that it saves.
    Call(usize, Vec<Storage>),
    /// A rule for an operation of Burn, and the storages that it saves.
    Rule(Rule, Vec<Storage>),
}

/// The liveness of the storages of a stage.
#[derive(Default)]
pub(super) struct Liveness {
    /// The first and the last time at which each storage is alive.
    of: HashMap<Storage, [usize; 2]>,
    pub now: usize,
}

impl Liveness {
    pub fn make(&mut self, storage: Storage) {
        self.of.entry(storage).or_insert([self.now, self.now]);
    }

    pub fn touch(&mut self, storage: Storage) {
        if let Some([_, last]) = self.of.get_mut(&storage) {
            *last = self.now;
        }
    }

    /// Returns the bytes that are alive at each time.
    pub fn bytes(&self, storages: &Storages) -> Vec<u64> {
        let mut changes = vec![0_i64; self.now + 2];
        for (storage, [first, last]) in &self.of {
            let bytes = storages.bytes(*storage) as i64;
            changes[*first] += bytes;
            changes[last + 1] -= bytes;
        }
        let mut alive = 0;
        let sums = changes.into_iter().map(|change| {
            alive += change;
            alive as u64
        });
        sums.collect()
    }
}

/// A span of times. Both ends are included.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Span {
    pub start: usize,
    pub end: usize,
}

/// The data that is collected for the current stage.
#[derive(Default)]
pub(super) struct Stage {
    /// The layers in the order of the forward: the embedding, the layers, the output layer.
    pub names: Vec<LayerName>,
    pub layers: Vec<LayerProfile>,
    pub nodes: Vec<Node>,
    pub tracked: HashSet<TensorId>,
    /// The number of nodes that save each storage.
    pub saved: HashMap<Storage, usize>,
    /// The tensors that the nodes with rules save, in the order of the nodes.
    pub held_by_rules: Vec<Storage>,
    /// Saved inputs of recomputed blocks that may be offloaded to the host, each with its layer.
    pub offloadable: Vec<(usize, Storage)>,
    /// Whether the current call saves an input that may be offloaded to the host.
    pub is_offloadable: bool,
    pub liveness: Liveness,
    /// The time at which the forward of each layer starts.
    pub forward: Vec<usize>,
    pub forward_end: usize,
    /// The time span of the backward of each layer.
    pub backward: Vec<Option<Span>>,
    /// The gradient of each tensor of the forward.
    pub gradients: HashMap<TensorId, Storage>,
    /// Gradients that the current call has taken from the graph. The call holds them until it ends.
    pub taken: Vec<Storage>,
    pub input: Option<Storage>,
    /// Storages that are kept for deferred weight gradients.
    pub deferred: HashSet<Storage>,
    pub deferred_bytes: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerName {
    Embedding,
    Layer(usize),
    Output,
}

impl Stage {
    /// Adds the input of the stage. It is a leaf of the graph, which keeps it until the backward is over.
    pub fn take_input(&mut self, tensor: &TensorIr, storage: Storage) {
        self.tracked.insert(tensor.id);
        self.saved.insert(storage, 1);
        self.input = Some(storage);
        self.layers[0].saved.push(SavedTensor {
            name: "input of the stage".into(),
            bytes: bytes_of(tensor),
        });
    }

    /// Returns whether the graph holds a storage that no recorded call holds. The storage was saved by an operation of
    /// Burn, is a gradient that is not used yet, or is the input of the stage.
    pub fn holds(&self, storage: Storage) -> bool {
        self.input == Some(storage)
            || self.held_by_rules.contains(&storage)
            || self.gradients.values().any(|it| *it == storage)
    }

    pub fn extend_backward(&mut self, layer: usize) {
        let now = self.liveness.now;
        let span = self.backward[layer].get_or_insert(Span {
            start: now,
            end: now,
        });
        span.end = now;
    }

    /// Adds the gradient of a tensor. Further gradients of the same tensor are added to the first one in place.
    pub fn add_gradient(&mut self, tensor: TensorId, storage: Storage) {
        self.gradients.entry(tensor).or_insert(storage);
    }

    pub fn profile(mut self, storages: &Storages, repeat: Repeat) -> StageProfile {
        let repeated = self.repeated(repeat);
        let mut alive = self.liveness.bytes(storages);
        for (layer, span) in self.layers.iter_mut().zip(&self.backward) {
            if let Some(Span { start, end }) = span {
                let peak = alive[*start..=*end].iter().max().copied().unwrap_or(0);
                let before = alive[start.saturating_sub(1)];
                layer.backward_bytes = peak.saturating_sub(before);
            }
        }
        self.add_repeated(&mut alive, &repeated, repeat.times);
        let count = |layer: usize| {
            1 + if repeated.contains(&layer) {
                repeat.times
            } else {
                0
            }
        };
        let sum = |bytes: &dyn Fn(usize) -> u64| {
            let layers = 0..self.layers.len();
            layers.map(|it| count(it) as u64 * bytes(it)).sum::<u64>()
        };
        let kept = sum(&|it| self.layers[it].saved_bytes());
        let peak = |times: &[u64]| times.iter().max().copied().unwrap_or(0);
        let (forward, backward) = alive.split_at(self.forward_end + 1);
        let mut profile = StageProfile {
            forward_bytes: peak(forward).max(kept),
            backward_bytes: peak(backward).max(kept),
            deferred_bytes: sum(&|it| self.deferred_bytes[it]),
            offloadable: self.inputs_for_host(storages, &repeated, repeat.times),
            input_bytes: self.input.map_or(0, |storage| storages.bytes(storage)),
            ..StageProfile::default()
        };
        let counts: Vec<_> = (0..self.layers.len()).map(count).collect();
        let layers = self.names.into_iter().zip(self.layers).zip(counts);
        for ((name, layer), times) in layers {
            match name {
                LayerName::Embedding if layer == LayerProfile::default() => {}
                LayerName::Embedding => profile.embedding = Some(layer),
                LayerName::Output => profile.output = Some(layer),
                LayerName::Layer(_) => match profile.layers.iter_mut().find(|(it, _)| *it == layer)
                {
                    Some((_, count)) => *count += times,
                    None => profile.layers.push((layer, times)),
                },
            }
        }
        profile
    }

    /// Returns the recorded layers whose results are used for the layers that were not recorded. They are the
    /// second-to-last repetition.
    fn repeated(&self, repeat: Repeat) -> Range<usize> {
        let is_layer = |name: &LayerName| matches!(name, LayerName::Layer(_));
        let after = self.names.iter().rposition(is_layer).map_or(0, |at| at + 1);
        let end = after.saturating_sub(repeat.period);
        end.saturating_sub(repeat.period)..end
    }

    /// Adds the memory of the layers that were not recorded. They are kept from the forward of the layer after the
    /// repeated layers to the end of that layer's backward.
    fn add_repeated(&self, alive: &mut [u64], repeated: &Range<usize>, times: usize) {
        let after = self
            .forward
            .get(repeated.end)
            .zip(self.backward.get(repeated.end));
        let Some((start, Some(Span { end, .. }))) = after.filter(|_| times > 0) else {
            return;
        };
        let kept = self.layers[repeated.clone()].iter();
        let kept = times as u64 * kept.map(LayerProfile::saved_bytes).sum::<u64>();
        for bytes in &mut alive[*start..=*end] {
            *bytes += kept;
        }
    }

    /// Returns the inputs that may be offloaded to the host, in the order of the forward.
    fn inputs_for_host(
        &self,
        storages: &Storages,
        repeated: &Range<usize>,
        times: usize,
    ) -> Vec<BlockInput> {
        let input = |(_, storage): &(usize, Storage)| BlockInput {
            bytes: storages.bytes(*storage),
            is_shared: self.saved.get(storage) != Some(&1),
        };
        let part = |from: usize, to: usize| {
            let own = self.offloadable.iter();
            own.filter(move |(layer, _)| (from..to).contains(layer))
                .map(input)
        };
        let mut inputs: Vec<_> = part(0, repeated.end).collect();
        for _ in 0..times {
            inputs.extend(part(repeated.start, repeated.end));
        }
        inputs.extend(part(repeated.end, usize::MAX));
        inputs
    }
}
