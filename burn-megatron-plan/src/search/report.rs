//! The results of a search, and the numbers of rejected candidates with their reasons.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::memory::MemoryByKind;
use super::super::time::{StepEstimate, StepPart};
use super::super::{Candidate, Recompute};
use super::{Sizes, sizes_of};

/// Why candidates are not among the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rejection {
    /// The devices do not form the mesh.
    Mesh,
    /// The model, or its sequence, cannot be split so.
    Model,
    /// The samples cannot be divided over replicas and micro-batches.
    Batch,
    /// The layers cannot be distributed over the stages.
    Stages,
    /// There is no such schedule for so many micro-batches.
    Schedule,
    /// The data axis cannot be sharded so.
    Sharding,
    /// It does not fit into memory.
    Memory,
    /// Its memory cannot be computed, as an operation of the model cannot have these sizes.
    Unplanned,
    /// Other settings of the same sizes are faster.
    SameSizes,
    /// Layouts of other sizes are faster.
    Slower,
}

impl Rejection {
    /// In words, as in `12 candidates: the mesh`.
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

/// The candidates that were rejected for one reason, and the first message.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RejectionCount {
    /// Their number.
    pub candidates: u64,
    /// Why the first one was, where there is more to say.
    pub example: Option<String>,
}

/// The candidates of a search. All are counted: their number is that of the best ones and the rejected.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SearchCounts {
    /// All that were considered.
    pub candidates: u64,
    /// By reason.
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

    /// Adds others, whose messages come after those that there are.
    pub(super) fn extend(&mut self, others: Self) {
        self.candidates += others.candidates;
        for (reason, count) in others.rejected {
            self.add(reason, count.candidates, count.example);
        }
    }
}

/// A layout that runs, with what a step costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The layout and its settings.
    pub candidate: Candidate,
    /// The time of a step.
    pub step: StepEstimate,
    /// The memory of the rank of the pipeline that needs the most.
    pub memory: MemoryByKind,
    /// Tokens per second of all devices.
    pub tokens_per_second: f64,
    /// Model operations as a share of the peak of all devices, from 0 to 1.
    pub mfu: f64,
}

impl Plan {
    /// The sizes of the axes.
    pub(super) fn sizes(&self) -> Sizes {
        sizes_of(&self.candidate.layout)
    }

    /// The order in which plans that take as long are preferred: fewer tensor, then pipeline, then context ranks, then less
    /// recomputation, then larger micro-batches, then more stages per rank.
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

    /// The part of the step in which it loses the most to a faster plan, and the seconds per step. `None` if it loses none.
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
    /// The best plans, one for the sizes of the axes, the best first.
    pub best: Vec<Plan>,
    /// Where none fits: the one that needs the least memory.
    pub nearest: Option<Plan>,
    /// The numbers of candidates, and the reasons for which they were rejected.
    pub counts: SearchCounts,
}

/// Sorts plans by time, and plans with equal times by [preference](Plan::preference).
pub(super) fn sort(plans: &mut [Plan]) {
    plans.sort_by(|one, two| {
        let order = one.step.seconds.total_cmp(&two.step.seconds);
        order.then_with(|| one.preference().cmp(&two.preference()))
    });
}
