//! The results of a search: the best plans, and the numbers of rejected candidates with the reasons.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::memory::MemoryByKind;
use super::super::time::{StepEstimate, StepPart};
use super::super::{Candidate, Recompute};
use super::{Sizes, sizes_of};

/// The reason why a candidate is not among the best plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rejection {
    /// The number of devices does not match the sizes of the axes.
    Mesh,
    /// The layout cannot split the model or its sequences.
    Model,
    /// The global batch cannot be divided into micro-batches on the data-parallel replicas.
    Batch,
    /// The layers cannot be distributed over the stages.
    Stages,
    /// The schedule does not support this number of micro-batches.
    Schedule,
    /// The training state cannot be sharded in this way over the data axis.
    Sharding,
    /// The candidate does not fit into memory.
    Memory,
    /// The memory cannot be computed, because an operation of the model does not support these sizes.
    Unplanned,
    /// Other candidates with the same axis sizes are faster.
    SameSizes,
    /// Layouts with other axis sizes are faster.
    Slower,
}

impl Rejection {
    /// Returns a description of the reason, for example for a line such as `12 candidates: the devices do not form the
    /// mesh`.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Mesh => "the devices do not form the mesh",
            Self::Model => "the model cannot be split this way",
            Self::Batch => "the samples cannot be divided this way",
            Self::Stages => "the layers cannot be distributed over the stages",
            Self::Schedule => "the schedule does not support this number of micro-batches",
            Self::Sharding => "the data axis cannot be sharded this way",
            Self::Memory => "more memory than available",
            Self::Unplanned => "their memory cannot be computed",
            Self::SameSizes => "other settings of the same sizes are faster",
            Self::Slower => "layouts of other sizes are faster",
        }
    }
}

/// The number of candidates that were rejected for one reason, with an example.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RejectionCount {
    /// The number of candidates.
    pub candidates: u64,
    /// The error message of one of the rejected candidates, if there is a message.
    pub example: Option<String>,
}

/// The numbers of evaluated and rejected candidates of a search. Every candidate is either one of the best plans or
/// rejected.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SearchCounts {
    /// The number of all candidates.
    pub candidates: u64,
    /// The numbers of rejected candidates, keyed by reason.
    pub rejected: BTreeMap<Rejection, RejectionCount>,
}

impl SearchCounts {
    pub(super) fn add(&mut self, reason: Rejection, candidates: u64, example: Option<String>) {
        if candidates == 0 {
            return;
        }
        let count = self.rejected.entry(reason).or_default();
        count.candidates += candidates;
        if count.example.is_none() {
            count.example = example;
        }
    }

    /// Adds other counts. Existing examples are kept.
    pub(super) fn extend(&mut self, others: Self) {
        self.candidates += others.candidates;
        for (reason, count) in others.rejected {
            self.add(reason, count.candidates, count.example);
        }
    }
}

/// A plan: a valid candidate with the estimated time and memory of a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The layout and the other settings of the plan.
    pub candidate: Candidate,
    /// The estimated time of a step.
    pub step: StepEstimate,
    /// The memory of the pipeline rank that needs the most memory.
    pub memory: MemoryByKind,
    /// The throughput of all devices together, in tokens per second.
    pub tokens_per_second: f64,
    /// The model FLOPs utilization (MFU): the FLOP/s of the model divided by the peak throughput of all devices, from 0
    /// to 1.
    pub mfu: f64,
}

impl Plan {
    /// Returns the sizes of the axes.
    pub(super) fn sizes(&self) -> Sizes {
        sizes_of(&self.candidate.layout)
    }

    /// Returns the order of preference of plans with equal times: fewer tensor ranks, then fewer pipeline ranks, then
    /// fewer context ranks, then less recomputation, then larger micro-batches, then more stages per rank.
    pub(super) fn preference(&self) -> impl Ord + use<> {
        let Candidate {
            layout,
            micro_batch,
            recompute,
            ..
        } = &self.candidate;
        let later = Recompute::ALL.iter().position(|other| other == recompute);
        let stages = layout.virtual_stages.unwrap_or(1);
        let order = (later, std::cmp::Reverse((*micro_batch, stages)));
        let expert = (layout.expert_tensor_size(), layout.expert);
        (
            layout.tensor,
            layout.pipeline,
            layout.context,
            order,
            expert,
        )
    }

    /// Returns the part of the step that takes the most additional time compared with the plan `best`, and the
    /// additional seconds per step. Returns `None` if no part takes longer than in `best`.
    pub fn loses_by(&self, best: &Self) -> Option<(StepPart, f64)> {
        let parts = self.step.parts.iter();
        let lost = parts.map(|(part, seconds)| (part, seconds - best.step.parts[part]));
        let most = lost.max_by(|one, two| one.1.total_cmp(&two.1))?;
        (most.1 > 0.0).then_some(most)
    }
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchReport {
    /// The best plans, at most one for each set of axis sizes, fastest first.
    pub best: Vec<Plan>,
    /// The plan that needs the least memory, if no plan fits into memory.
    pub nearest: Option<Plan>,
    /// The numbers of candidates, with the reasons why they were rejected.
    pub counts: SearchCounts,
}

/// Sorts plans by time, and plans with equal times by [preference](Plan::preference).
pub(super) fn sort(plans: &mut [Plan]) {
    plans.sort_by(|one, two| {
        let order = one.step.seconds.total_cmp(&two.step.seconds);
        order.then_with(|| one.preference().cmp(&two.preference()))
    });
}
