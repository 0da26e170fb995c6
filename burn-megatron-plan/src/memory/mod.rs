//! Plans the memory of every pipeline rank of a layout, by kind, before anything is allocated.
//!
//! The state (parameters, gradients, optimizer, buffers) comes from a [`MemoryPlan`], which is exact. The tensors that
//! a micro-batch keeps for its backward, and the temporary tensors, come from a [`StageProfile`]. The profile runs the
//! model's own forward and backward on shapes only. The plan therefore includes recomputation, fused operations,
//! sequence splits and loss chunks of the model. The number of micro-batches in flight comes from the schedule. The
//! peak is the maximum over the actions of the schedule of the bytes of all stages of the rank.

mod host_inputs;
mod in_flight;
mod picture;
mod posted;
mod report;
mod request;
#[cfg(test)]
mod tests;

use std::iter::Sum;
use std::ops::Add;

use serde::{Deserialize, Serialize};

use crate::profile::StageProfile;
use burn_megatron::data_parallel::{MemoryPlan, ZeroStage};
use burn_megatron::nn::ActivationOffload;
use burn_megatron::pipeline::schedule::{Action, Schedule};

pub use in_flight::MemorySample;
pub use request::{MemoryError, MemoryRequest, RankProfiles, plan_memory, plan_memory_with};

/// The memory of one rank in bytes, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryByKind {
    /// Parameters in the type of the model.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Master weights and moments.
    pub optimizer: u64,
    /// Buffers of the data-parallel collectives, and gathered parameters.
    pub buffers: u64,
    /// The activations that the micro-batches in flight keep for their backward, and the tensors that are sent between
    /// stages.
    pub activations: u64,
    /// The tensors that the output layer and the loss keep. Includes the temporary tensors of these layers if they are
    /// at the peak.
    pub logits: u64,
    /// Other temporary tensors of the operation that runs.
    pub transient: u64,
    /// Memory that the allocator wastes: see [`MemoryRequest::slack`].
    pub slack: u64,
}

impl MemoryByKind {
    /// Returns the state of a rank.
    pub fn state(plan: &MemoryPlan) -> Self {
        Self {
            parameters: plan.parameters,
            gradients: plan.gradients,
            optimizer: plan.optimizer,
            buffers: plan.buffers,
            ..Self::default()
        }
    }

    /// Returns the bytes of all kinds, with their names.
    pub fn kinds(&self) -> [(&'static str, u64); 8] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("buffers", self.buffers),
            ("activations", self.activations),
            ("logits", self.logits),
            ("transient", self.transient),
            ("slack", self.slack),
        ]
    }

    /// Returns the sum over all kinds.
    pub fn total(&self) -> u64 {
        let kinds = self.kinds().into_iter();
        kinds.fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// Adds the slack of an allocator that needs `factor` times the allocated bytes. Parameters, gradients and
    /// optimizer state are few large allocations and need no slack.
    fn with_slack(self, factor: f64) -> Self {
        let parts = [self.buffers, self.activations, self.logits, self.transient];
        let pieces: u64 = parts.into_iter().fold(0, u64::saturating_add);
        Self {
            slack: (pieces as f64 * (factor - 1.0)).max(0.0) as u64,
            ..self
        }
    }
}

impl Add for MemoryByKind {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            parameters: self.parameters + other.parameters,
            gradients: self.gradients + other.gradients,
            optimizer: self.optimizer + other.optimizer,
            buffers: self.buffers + other.buffers,
            activations: self.activations + other.activations,
            logits: self.logits + other.logits,
            transient: self.transient + other.transient,
            slack: self.slack + other.slack,
        }
    }
}

impl Sum for MemoryByKind {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

/// The memory of one pipeline rank.
#[derive(Clone, Debug, PartialEq)]
pub struct RankMemory {
    /// The peak memory.
    pub peak: MemoryByKind,
    /// The action at the peak, or `None` for the optimizer step.
    pub at: Option<Action>,
    /// The peak number of bytes of saved inputs of recomputed blocks on the host.
    pub host_activations: u64,
    /// The memory before, during and after each action of the rank, in order.
    pub samples: Vec<MemorySample>,
}

/// The memory of all pipeline ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryReport {
    /// The memory of each pipeline rank.
    pub ranks: Vec<RankMemory>,
    /// The profile of each stage.
    pub stages: Vec<StageProfile>,
    /// The state of each pipeline rank.
    pub states: Vec<MemoryPlan>,
    /// The order in which micro-batches pass through the stages.
    pub schedule: Schedule,
}

impl MemoryReport {
    /// Creates the report of all pipeline ranks from their states and the profiles of the stages, in the order of the
    /// schedule.
    ///
    /// `slack` is the factor of [`MemoryRequest::slack`]. `offload` determines the [inputs](StageProfile::offloadable)
    /// that are offloaded to the host. `receives_ahead` is the number of receives from each neighbor that are
    /// [posted ahead](burn_megatron::pipeline::engine::P2pConfig::receives_ahead).
    pub fn new(
        schedule: &Schedule,
        stages: Vec<StageProfile>,
        states: Vec<MemoryPlan>,
        zero_stage: ZeroStage,
        slack: f64,
        (offload, receives_ahead): (ActivationOffload, usize),
    ) -> Self {
        let ranks = states.iter().enumerate();
        let ranks = ranks.map(|(rank, state)| {
            let state = (state, zero_stage);
            let kept = (offload, receives_ahead);
            in_flight::rank_memory(schedule, rank, &stages, state, slack, kept)
        });
        Self {
            ranks: ranks.collect(),
            stages,
            states,
            schedule: schedule.clone(),
        }
    }

    /// Returns the pipeline rank that needs the most memory, with its memory.
    pub fn fullest(&self) -> (usize, &RankMemory) {
        let ranks = self.ranks.iter().enumerate();
        let fullest =
            ranks.max_by_key(|(rank, memory)| (memory.peak.total(), self.ranks.len() - rank));
        match fullest {
            Some(fullest) => fullest,
            None => unreachable!("a pipeline has a rank"),
        }
    }
}
