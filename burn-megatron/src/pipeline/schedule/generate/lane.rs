//! Writing down what one rank computes.

use std::collections::VecDeque;

use super::super::{Action, ActionKind};

/// The computations of one rank, in order.
///
/// Each of its stages takes the micro-batches in order, so that a step names only the stage, by its
/// place among those of the rank.
pub(super) struct Lane {
    stages: Vec<usize>,
    /// For each stage, the next micro-batch to go forward and the next to go backward.
    forward: Vec<usize>,
    backward: Vec<usize>,
    /// Places and micro-batches whose weight gradients are put off, oldest first.
    put_off: VecDeque<(usize, usize)>,
    actions: Vec<Action>,
}

impl Lane {
    pub(super) fn new(stages: impl Into<Vec<usize>>) -> Self {
        let stages = stages.into();
        Lane {
            forward: vec![0; stages.len()],
            backward: vec![0; stages.len()],
            stages,
            put_off: VecDeque::new(),
            actions: vec![],
        }
    }

    pub(super) fn forward(&mut self, place: usize) -> &mut Self {
        let micro_batch = self.forward[place];
        self.forward[place] += 1;
        self.push(ActionKind::Forward, place, micro_batch)
    }

    pub(super) fn backward(&mut self, place: usize) -> &mut Self {
        let micro_batch = self.backward[place];
        self.backward[place] += 1;
        self.push(ActionKind::Backward, place, micro_batch)
    }

    /// An input gradient, whose weight gradient is put off.
    pub(super) fn input(&mut self, place: usize) -> &mut Self {
        let micro_batch = self.backward[place];
        self.backward[place] += 1;
        self.put_off.push_back((place, micro_batch));
        self.push(ActionKind::InputGradient, place, micro_batch)
    }

    /// The weight gradient that was put off longest, if any was.
    pub(super) fn weight(&mut self) -> &mut Self {
        match self.put_off.pop_front() {
            Some((place, micro_batch)) => self.push(ActionKind::WeightGradient, place, micro_batch),
            None => self,
        }
    }

    /// The weight gradient of one stage that was put off longest, if any was.
    pub(super) fn weight_of(&mut self, place: usize) -> &mut Self {
        let oldest = self.put_off.iter().position(|(own, _)| *own == place);
        match oldest.and_then(|oldest| self.put_off.remove(oldest)) {
            Some((place, micro_batch)) => self.push(ActionKind::WeightGradient, place, micro_batch),
            None => self,
        }
    }

    /// The number of weight gradients that are put off.
    pub(super) fn put_off(&self) -> usize {
        self.put_off.len()
    }

    /// What was written, without the micro-batches from `micro_batches` on.
    pub(super) fn finish(mut self, micro_batches: usize) -> Vec<Action> {
        self.actions
            .retain(|action| action.micro_batch < micro_batches);
        self.actions
    }

    fn push(&mut self, kind: ActionKind, place: usize, micro_batch: usize) -> &mut Self {
        let action = Action::new(kind, self.stages[place], micro_batch);
        self.actions.push(action);
        self
    }
}
