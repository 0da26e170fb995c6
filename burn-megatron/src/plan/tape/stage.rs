//! What is gathered of one stage.

use std::collections::{HashMap, HashSet};

use burn_ir::{TensorId, TensorIr};

use super::operations::Rule;
use super::storage::{Storage, Storages, bytes_of};
use crate::plan::profile::{BlockInput, LayerProfile, SavedTensor, StageProfile};

/// An operation of the forward that has a backward.
pub(super) struct Node {
    pub layer: usize,
    pub outputs: Vec<TensorIr>,
    pub backward: NodeBackward,
}

pub(super) enum NodeBackward {
    /// Recorded: the call and the storages that it saves.
    Call(usize, Vec<Storage>),
    /// By a rule.
    Rule(Rule, Vec<Storage>),
}

/// The lives of the storages of a stage.
#[derive(Default)]
pub(super) struct Lives {
    /// Of a storage, the first and the last time at which it is alive.
    of: HashMap<Storage, [usize; 2]>,
    pub now: usize,
}

impl Lives {
    pub fn make(&mut self, storage: Storage) {
        self.of.entry(storage).or_insert([self.now, self.now]);
    }

    pub fn touch(&mut self, storage: Storage) {
        if let Some([_, last]) = self.of.get_mut(&storage) {
            *last = self.now;
        }
    }

    /// The bytes alive at each time.
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

/// Where a layer begins, and a span of times.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Span {
    pub start: usize,
    pub end: usize,
}

/// What is gathered of the present stage.
#[derive(Default)]
pub(super) struct Stage {
    /// `None` for the embedding, the output layer after all.
    pub names: Vec<LayerName>,
    pub layers: Vec<LayerProfile>,
    pub nodes: Vec<Node>,
    pub tracked: HashSet<TensorId>,
    /// How many nodes save a storage.
    pub saved: HashMap<Storage, usize>,
    /// Saved inputs of recomputed blocks that may be on the host.
    pub offloadable: Vec<Storage>,
    /// Whether the present call saves such an input.
    pub is_offloadable: bool,
    pub lives: Lives,
    pub forward_end: usize,
    /// By layer, the times of its backward.
    pub backward: Vec<Option<Span>>,
    /// Of a tensor of the forward, its gradient.
    pub gradients: HashMap<TensorId, Storage>,
    pub input: Option<Storage>,
    /// What deferred weight gradients hold.
    pub deferred: HashSet<Storage>,
    pub deferred_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerName {
    Embedding,
    Layer(usize),
    Output,
}

impl Stage {
    /// The output of the stage before, a leaf of the graph, which keeps it until the backward is over.
    pub fn take_input(&mut self, tensor: &TensorIr, storage: Storage) {
        self.tracked.insert(tensor.id);
        self.saved.insert(storage, 1);
        self.input = Some(storage);
        self.layers[0].saved.push(SavedTensor {
            name: "input of the stage".into(),
            bytes: bytes_of(tensor),
        });
    }

    pub fn begin_layer(&mut self, layer: usize) {
        let now = self.lives.now;
        let span = self.backward[layer].get_or_insert(Span {
            start: now,
            end: now,
        });
        span.end = now;
    }

    pub fn end_layer(&mut self, layer: usize) {
        self.begin_layer(layer);
    }

    /// Another gradient of a tensor is added to the first.
    pub fn add_gradient(&mut self, tensor: TensorId, storage: Storage) {
        self.gradients.entry(tensor).or_insert(storage);
    }

    pub fn profile(mut self, storages: &Storages) -> StageProfile {
        let alive = self.lives.bytes(storages);
        for (layer, span) in self.layers.iter_mut().zip(&self.backward) {
            if let Some(Span { start, end }) = span {
                let peak = alive[*start..=*end].iter().max().copied().unwrap_or(0);
                let before = alive[start.saturating_sub(1)];
                layer.backward_bytes = peak.saturating_sub(before);
            }
        }
        let kept: u64 = self.layers.iter().map(LayerProfile::saved_bytes).sum();
        let peak = |times: &[u64]| times.iter().max().copied().unwrap_or(0);
        let (forward, backward) = alive.split_at(self.forward_end + 1);
        let mut profile = StageProfile {
            forward_bytes: peak(forward).max(kept),
            backward_bytes: peak(backward).max(kept),
            deferred_bytes: self.deferred_bytes,
            offloadable: self
                .offloadable
                .iter()
                .map(|it| BlockInput {
                    bytes: storages.bytes(*it),
                    is_shared: self.saved.get(it) != Some(&1),
                })
                .collect(),
            input_bytes: self.input.map_or(0, |storage| storages.bytes(storage)),
            ..StageProfile::default()
        };
        for (name, layer) in self.names.into_iter().zip(self.layers) {
            match name {
                LayerName::Embedding if layer == LayerProfile::default() => {}
                LayerName::Embedding => profile.embedding = Some(layer),
                LayerName::Output => profile.output = Some(layer),
                LayerName::Layer(_) => match profile.layers.iter_mut().find(|(it, _)| *it == layer)
                {
                    Some((_, count)) => *count += 1,
                    None => profile.layers.push((layer, 1)),
                },
            }
        }
        profile
    }
}
