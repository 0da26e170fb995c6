//! Builds the list of computations of one rank.

use std::collections::VecDeque;

use super::super::{Action, ActionKind};

/// The computations of one rank, in order.
///
/// Each stage runs the micro-batches in order, so a call only names the chunk: the index of the stage among the
/// stages of the rank.
pub(super) struct RankProgram {
    stages: Vec<usize>,
    /// The micro-batch of each chunk's next forward and next backward.
    forward: Vec<usize>,
    backward: Vec<usize>,
    /// Chunks and micro-batches of deferred weight gradients, oldest first.
    deferred: VecDeque<(usize, usize)>,
    actions: Vec<Action>,
}

impl RankProgram {
    pub(super) fn new(stages: impl Into<Vec<usize>>) -> Self {
        let stages = stages.into();
        RankProgram {
            forward: vec![0; stages.len()],
            backward: vec![0; stages.len()],
            stages,
            deferred: VecDeque::new(),
            actions: vec![],
        }
    }

    pub(super) fn forward(&mut self, chunk: usize) -> &mut Self {
        self.forward_in(chunk, false)
    }

    /// Adds a forward, which may be paired with the next added backward.
    pub(super) fn forward_in(&mut self, chunk: usize, pair: bool) -> &mut Self {
        let micro_batch = self.forward[chunk];
        self.forward[chunk] += 1;
        let kind = match pair {
            true => ActionKind::PairedForward,
            false => ActionKind::Forward,
        };
        self.push(kind, chunk, micro_batch)
    }

    pub(super) fn backward(&mut self, chunk: usize) -> &mut Self {
        let micro_batch = self.backward[chunk];
        self.backward[chunk] += 1;
        self.push(ActionKind::Backward, chunk, micro_batch)
    }

    /// Adds an input gradient and defers its weight gradient.
    pub(super) fn input_gradient(&mut self, chunk: usize) -> &mut Self {
        let micro_batch = self.backward[chunk];
        self.backward[chunk] += 1;
        self.deferred.push_back((chunk, micro_batch));
        self.push(ActionKind::InputGradient, chunk, micro_batch)
    }

    /// Adds the oldest deferred weight gradient, if any.
    pub(super) fn weight_gradient(&mut self) -> &mut Self {
        match self.deferred.pop_front() {
            Some((chunk, micro_batch)) => self.push(ActionKind::WeightGradient, chunk, micro_batch),
            None => self,
        }
    }

    /// Adds the oldest deferred weight gradient of one chunk, if any.
    pub(super) fn weight_gradient_of(&mut self, chunk: usize) -> &mut Self {
        let oldest = self.deferred.iter().position(|(own, _)| *own == chunk);
        match oldest.and_then(|oldest| self.deferred.remove(oldest)) {
            Some((chunk, micro_batch)) => self.push(ActionKind::WeightGradient, chunk, micro_batch),
            None => self,
        }
    }

    /// Returns the actions, including all deferred weight gradients. Actions of micro-batches whose number is at least
    /// `micro_batches` are removed.
    pub(super) fn finish(mut self, micro_batches: usize) -> Vec<Action> {
        while !self.deferred.is_empty() {
            self.weight_gradient();
        }
        let is_kept = |action: &Action| action.micro_batch < micro_batches;
        let pairs: Vec<_> = self
            .actions
            .windows(2)
            .map(|two| is_kept(&two[1]))
            .collect();
        for (action, is_paired) in self.actions.iter_mut().zip(pairs) {
            if action.kind == ActionKind::PairedForward && !is_paired {
                action.kind = ActionKind::Forward;
            }
        }
        self.actions.retain(is_kept);
        self.actions
    }

    fn push(&mut self, kind: ActionKind, chunk: usize, micro_batch: usize) -> &mut Self {
        let action = Action::new(kind, self.stages[chunk], micro_batch);
        self.actions.push(action);
        self
    }
}
