//! The memory of one pipeline rank for each action of its schedule.

use super::host_inputs::HostInputs;
use super::posted::PostedReceives;
use super::{MemoryByKind, RankMemory};
use crate::profile::{LayerProfile, StageProfile};
use burn_megatron::data_parallel::{MemoryPlan, ZeroStage};
use burn_megatron::nn::ActivationOffload;
use burn_megatron::pipeline::schedule::{Action, ActionKind, Schedule};

/// The memory of a pipeline rank at one action of the schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemorySample {
    /// The action.
    pub action: Action,
    /// The memory before the action.
    pub before: MemoryByKind,
    /// The peak memory while the action runs.
    pub peak: MemoryByKind,
    /// The memory after the action.
    pub after: MemoryByKind,
}

/// The memory of a rank in addition to its training state, in bytes.
#[derive(Debug)]
struct Alive {
    activations: u64,
    logits: u64,
    on_host: HostInputs,
}

pub(super) fn rank_memory(
    schedule: &Schedule,
    rank: usize,
    stages: &[StageProfile],
    (state, zero_stage): (&MemoryPlan, ZeroStage),
    slack: f64,
    (offload, receives_ahead): (ActivationOffload, usize),
) -> RankMemory {
    let mut receives = PostedReceives::new(schedule, rank, stages, receives_ahead);
    let all = MemoryByKind::state(state);
    // Stages 0 and 1 use their buffers only in the optimizer step, when no micro-batch is in flight.
    let base = if zero_stage <= ZeroStage::Optimizer {
        MemoryByKind { buffers: 0, ..all }
    } else {
        all
    };
    let mut alive = Alive {
        activations: receives.at_start(),
        logits: 0,
        on_host: HostInputs::new(offload),
    };
    let mut samples = vec![];
    let resting = |alive: &Alive| {
        let memory = MemoryByKind {
            activations: alive.activations,
            logits: alive.logits,
            ..base
        };
        memory.with_slack(slack)
    };
    let mut actions = schedule.actions(rank).iter();
    while let Some(action) = actions.next() {
        let before = resting(&alive);
        if action.kind.is_receive() {
            alive.activations += receives.posted_in(action, schedule);
        }
        let is_paired = action.kind == ActionKind::PairedForward;
        let backward = is_paired.then(|| actions.next()).flatten();
        let transient = match backward {
            Some(backward) => alive.enter_pair(action, backward, stages),
            None => alive.enter(action, stages),
        };
        let both = [Some(action), backward].into_iter().flatten();
        let of_loss = both.clone().any(|it| stages[it.stage].output.is_some());
        let peak = MemoryByKind {
            activations: alive.activations,
            logits: alive.logits + if of_loss { transient } else { 0 },
            transient: if of_loss { 0 } else { transient },
            ..base
        };
        if is_paired {
            alive.hold(action, stages);
        }
        both.clone().for_each(|it| alive.leave(it, stages));
        samples.extend(both.map(|action| MemorySample {
            action: *action,
            before,
            peak: peak.with_slack(slack),
            after: resting(&alive),
        }));
    }
    let step = all.with_slack(slack);
    let highest = samples
        .iter()
        .rev()
        .max_by_key(|sample| sample.peak.total());
    let highest = highest.filter(|sample| sample.peak.total() >= step.total());
    RankMemory {
        peak: highest.map_or(step, |sample| sample.peak),
        at: highest.map(|sample| sample.action),
        host_activations: alive.on_host.peak,
        samples,
    }
}

impl Alive {
    /// Adds the memory that an action needs at its peak. Returns the size of its temporary tensors.
    fn enter(&mut self, action: &Action, stages: &[StageProfile]) -> u64 {
        let stage = &stages[action.stage];
        let kept = stage.saved_bytes();
        match action.kind {
            kind if kind.is_forward() => {
                self.hold(action, stages);
                stage.forward_bytes.saturating_sub(kept) + self.on_host.on_its_way(action, stage)
            }
            ActionKind::Backward | ActionKind::InputGradient => {
                stage.backward_bytes.saturating_sub(kept) + self.on_host.on_its_way(action, stage)
            }
            _ => 0,
        }
    }

    /// Adds the memory that a forward and a backward need at their peak if they run together. Returns the size of their
    /// temporary tensors. The forward and the backward alternate layer by layer. The backward releases the activations
    /// of a layer before the forward keeps the activations of its next layer.
    fn enter_pair(&mut self, forward: &Action, backward: &Action, stages: &[StageProfile]) -> u64 {
        let [one, other] = [forward, backward].map(|action| &stages[action.stage]);
        let largest = |stage: &StageProfile, of: fn(&LayerProfile) -> u64| {
            stage
                .layers
                .iter()
                .map(|(layer, _)| of(layer))
                .max()
                .unwrap_or(0)
        };
        let forward = one.forward_bytes.saturating_sub(one.saved_bytes());
        let between = one.saved_bytes().max(other.saved_bytes())
            + largest(one, LayerProfile::saved_bytes).max(forward)
            + largest(other, |layer| layer.backward_bytes);
        let peak = between.max(one.forward_bytes).max(other.backward_bytes);
        let alive = other.saved_bytes() + one.input_bytes;
        peak.saturating_sub(alive) + self.on_host.on_its_way(backward, other)
    }

    /// Records the end of a forward, which keeps the tensors that its backward reads.
    fn hold(&mut self, action: &Action, stages: &[StageProfile]) {
        let stage = &stages[action.stage];
        self.keep(stage);
        // The received input is also one of the kept tensors.
        self.release(stage.input_bytes);
        let left = self.on_host.leave(action, stage);
        self.release(left);
    }

    /// Releases the memory of an action after it has run.
    fn leave(&mut self, action: &Action, stages: &[StageProfile]) {
        let stage = &stages[action.stage];
        let sends = |sent: bool, bytes: u64| if sent { bytes } else { 0 };
        match action.kind {
            kind if kind.is_forward() => {
                self.activations += sends(stage.output.is_none(), stage.output_bytes());
            }
            ActionKind::Backward => {
                self.drop_kept(action, stage, 0);
                self.end_backward(stage);
            }
            ActionKind::InputGradient => {
                self.drop_kept(action, stage, stage.deferred_bytes);
                self.end_backward(stage);
            }
            ActionKind::WeightGradient => self.release(stage.deferred_bytes),
            ActionKind::SendActivation => self.release(stage.output_bytes()),
            ActionKind::SendGradient => self.release(stage.input_bytes),
            _ => {}
        }
    }

    fn keep(&mut self, stage: &StageProfile) {
        let logits = stage.output.as_ref().map_or(0, |layer| layer.saved_bytes());
        self.logits += logits;
        self.activations += stage.saved_bytes() - logits;
    }

    /// Releases the gradient that was received, and adds the gradient of the input, which is sent to the previous
    /// stage.
    fn end_backward(&mut self, stage: &StageProfile) {
        if stage.output.is_none() {
            self.release(stage.output_bytes());
        }
        self.activations += stage.input_bytes;
    }

    fn drop_kept(&mut self, action: &Action, stage: &StageProfile, deferred: u64) {
        let logits = stage.output.as_ref().map_or(0, |layer| layer.saved_bytes());
        self.logits = self.logits.saturating_sub(logits);
        let on_host = self.on_host.take(action);
        self.release(stage.saved_bytes() - logits - on_host);
        self.activations += deferred;
    }

    fn release(&mut self, bytes: u64) {
        self.activations = self.activations.saturating_sub(bytes);
    }
}
