//! Plans the memory of every pipeline rank of a layout, without allocating anything.
//!
//! A [`MemoryPlan`] gives the exact size of the training state (parameters, gradients, optimizer state and buffers). A
//! [`StageProfile`] gives the sizes of the temporary tensors and of the tensors that a micro-batch keeps for its
//! backward. It is computed by running the forward and the backward of the model with tensor shapes but without data.
//! The plan therefore includes recomputation, fused operations, sequence splits and loss chunks of the model. The
//! pipeline schedule determines the number of micro-batches in flight. The peak memory of a rank is the maximum over
//! all actions of the schedule, summed over the stages of the rank.

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

/// The memory of one rank in bytes, divided into kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryByKind {
    /// Parameters in the dtype of the model.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer state: master weights and moments.
    pub optimizer: u64,
    /// Buffers of data-parallel collectives, and parameters that ZeRO-3 has gathered.
    pub buffers: u64,
    /// The activations that the micro-batches in flight keep for their backward, and the tensors that are sent between
    /// stages.
    pub activations: u64,
    /// The tensors that the output layer and the loss keep for the backward. If the peak is in these layers, their
    /// temporary tensors are included.
    pub logits: u64,
    /// Temporary tensors of the operations that run at this time. Temporary tensors of the output layer and the loss
    /// are counted in `logits`.
    pub transient: u64,
    /// Memory that the allocator wastes: see [`MemoryRequest::slack`].
    pub slack: u64,
}

impl MemoryByKind {
    /// Returns the memory of the training state of a rank: parameters, gradients, optimizer state and buffers.
    pub fn state(plan: &MemoryPlan) -> Self {
        Self {
            parameters: plan.parameters,
            gradients: plan.gradients,
            optimizer: plan.optimizer,
            buffers: plan.buffers,
            ..Self::default()
        }
    }

    /// Returns the name of each kind with its number of bytes.
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

    /// Returns the total number of bytes.
    pub fn total(&self) -> u64 {
        let kinds = self.kinds().into_iter();
        kinds.fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// Adds the memory that an allocator wastes if it needs `factor` times the allocated bytes. Nothing is added for
    /// parameters, gradients and optimizer state, because they are a few large allocations.
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

/// The peak memory of one pipeline rank, and its memory over the schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct RankMemory {
    /// The peak memory of the rank.
    pub peak: MemoryByKind,
    /// The action of the schedule at which the peak occurs, or `None` if it occurs in the optimizer step.
    pub at: Option<Action>,
    /// The peak size of the block inputs that are offloaded to the host, in bytes.
    pub host_activations: u64,
    /// The memory before, during and after each action of the rank, in the order of the schedule.
    pub samples: Vec<MemorySample>,
}

/// The planned memory of all pipeline ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryReport {
    /// The memory of each pipeline rank.
    pub ranks: Vec<RankMemory>,
    /// The profile of each stage.
    pub stages: Vec<StageProfile>,
    /// The size of the training state of each pipeline rank.
    pub states: Vec<MemoryPlan>,
    /// The pipeline schedule.
    pub schedule: Schedule,
}

impl MemoryReport {
    /// Creates the report of all pipeline ranks from the sizes of their training states and the profiles of the
    /// pipeline stages.
    ///
    /// `slack` is described in [`MemoryRequest::slack`]. `offload` selects the [block
    /// inputs](StageProfile::offloadable) that are offloaded to the host. `receives_ahead` is the number of receives
    /// from each neighbor that are [posted ahead of time](burn_megatron::pipeline::engine::P2pConfig::receives_ahead).
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

    /// Returns the index of the pipeline rank that needs the most memory, and its memory.
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
