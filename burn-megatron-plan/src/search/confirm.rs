//! Checks the memory of the plans that a search found, by running the operations of the model without data.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::super::fit;
use super::super::memory::MemoryByKind;
use super::super::{Candidate, Recompute};
use super::space::{PipelineSettings, ShardingSettings};
use super::{Plan, Rejection, Search, SearchCounts, SearchProgress};
use burn_megatron::mesh::ScheduleSource;

/// The reason why the memory of a candidate cannot be computed.
#[derive(Clone, Debug, PartialEq)]
pub enum MemoryRefusal {
    /// The settings of the candidate are invalid. The value is the error message.
    Settings(String),
    /// The model cannot run micro-batches of this size in this layout, whatever the schedule and the sharding are. The
    /// value is the error message.
    Model(String),
}

/// A function that returns the memory of a candidate on the pipeline rank that needs the most memory. It runs the
/// operations of the model without data, as [`plan_memory`](crate::memory::plan_memory) does. The memory that the
/// allocator wastes is not included.
pub type OwnMemory<'a> = dyn Fn(&Candidate) -> Result<MemoryByKind, MemoryRefusal> + Sync + 'a;

/// A candidate whose memory exceeds the limit. Other candidates with the same axis sizes are compared with it.
#[derive(Clone, Debug)]
pub(super) struct Refutation {
    of: Group,
    sharding: ShardingSettings,
    offload: f64,
    why: Why,
}

#[derive(Clone, Debug)]
enum Why {
    /// The number of bytes that the candidate needs in addition to the number of bytes that the formulas give.
    Excess(u64),
    Refused(MemoryRefusal),
}

/// The settings that are equal in a group of candidates. The candidates of a group have equal axis sizes and differ
/// only in their sharding.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Group {
    pub sequence_parallel: bool,
    pub pipeline: PipelineSettings,
    pub micro_batch: usize,
    pub recompute: Recompute,
}

impl Group {
    fn of(candidate: &Candidate) -> Self {
        let layout = &candidate.layout;
        let pipeline = match &layout.schedule {
            Some(ScheduleSource::Kind(kind)) if layout.pipeline > 1 => {
                let stages = layout.virtual_stages;
                Some((*kind, stages.unwrap_or(kind.default_virtual_stages())))
            }
            _ => None,
        };
        Self {
            sequence_parallel: layout.sequence_parallel,
            pipeline,
            micro_batch: candidate.micro_batch,
            recompute: candidate.recompute,
        }
    }
}

/// The tolerated error of the formulas, as a share of the memory limit, for a candidate with another sharding than the
/// rejected candidate. If the memory is within this tolerance, it is computed by running the operations of the model.
const TOLERANCE: f64 = 0.01;

impl Refutation {
    /// Returns the reason if the model cannot run any candidate with these settings.
    pub fn refuses_model(&self, sequence_parallel: bool, micro_batch: usize) -> Option<&str> {
        let Why::Refused(MemoryRefusal::Model(text)) = &self.why else {
            return None;
        };
        let of = &self.of;
        let is_same = of.sequence_parallel == sequence_parallel && micro_batch >= of.micro_batch;
        is_same.then_some(text)
    }

    /// Returns whether this refutation shows that another candidate exceeds `limit`. The formulas give `bytes` for this
    /// other candidate.
    pub fn refutes(
        &self,
        group: &Group,
        (sharding, offload): (ShardingSettings, f64),
        bytes: u64,
        limit: u64,
    ) -> bool {
        if self.of != *group {
            return false;
        }
        if (self.sharding, self.offload) == (sharding, offload) {
            return true;
        }
        match &self.why {
            Why::Excess(excess) => (bytes + excess) as f64 > limit as f64 * (1.0 + TOLERANCE),
            Why::Refused(_) => false,
        }
    }

    /// Counts a candidate that this refutation rejects.
    pub fn count(&self, counts: &mut SearchCounts) {
        match &self.why {
            Why::Excess(_) => counts.add(Rejection::Memory, 1, None),
            Why::Refused(MemoryRefusal::Settings(text) | MemoryRefusal::Model(text)) => {
                counts.add(Rejection::Unplanned, 1, Some(text.clone()));
            }
        }
    }
}

impl Search<'_> {
    /// Computes the memory of the best plans by running the operations of the model. Returns whether at least one plan
    /// does not fit. The axis sizes of this plan are then searched again.
    pub(super) fn confirm(&mut self, memory: &OwnMemory<'_>) -> bool {
        let mut best: Vec<_> = self.best.values().map(|kept| kept.plan.clone()).collect();
        super::report::sort(&mut best);
        best.truncate(self.config.top);
        best.retain(|plan| !self.best[&plan.sizes()].is_confirmed);
        let confirmed = AtomicUsize::new(self.confirmed);
        let all = self.entries.len();
        let found = best.par_iter().map(|plan| {
            let found = memory(&plan.candidate);
            (self.progress)(SearchProgress {
                compared: all,
                all,
                confirmed: 1 + confirmed.fetch_add(1, Ordering::Relaxed),
            });
            found
        });
        let found: Vec<_> = found.collect();
        self.confirmed += found.len();
        let mut has_refuted = false;
        for (plan, found) in best.into_iter().zip(found) {
            let found = found.map(fit::with_slack);
            match found {
                Ok(memory) if memory.total() <= self.config.memory_limit => {
                    if let Some(kept) = self.best.get_mut(&plan.sizes()) {
                        kept.plan.memory = memory;
                        kept.is_confirmed = true;
                    }
                }
                found => {
                    has_refuted = true;
                    self.refute(plan, found);
                }
            }
        }
        has_refuted
    }

    fn refute(&mut self, plan: Plan, found: Result<MemoryByKind, MemoryRefusal>) {
        let (sizes, candidate) = (plan.sizes(), &plan.candidate);
        let why = match &found {
            Ok(memory) => Why::Excess(memory.total().saturating_sub(plan.memory.total())),
            Err(refusal) => Why::Refused(refusal.clone()),
        };
        let refutation = Refutation {
            of: Group::of(candidate),
            sharding: (candidate.layout.zero_stage, candidate.layout.hsdp),
            offload: candidate.offload,
            why,
        };
        self.refuted.entry(sizes).or_default().push(refutation);
        self.best.remove(&sizes);
        // A slower plan with the same axis sizes may now be the best.
        for visited in &mut self.entries {
            if visited.entry.sizes() == sizes {
                visited.found = None;
            }
        }
        if let Ok(memory) = found {
            let bytes = |plan: &Plan| plan.memory.total();
            let nearest = self.nearest_refuted.as_ref().map(bytes);
            if nearest.is_none_or(|nearest| memory.total() < nearest) {
                self.nearest_refuted = Some(Plan { memory, ..plan });
            }
        }
    }

    /// If no plan fits, computes the memory of the nearest plan by running the operations of the model. The memory of
    /// the plan is replaced if the result exceeds the limit.
    pub(super) fn confirm_nearest(&mut self, memory: &OwnMemory<'_>) {
        if !self.best.is_empty() || self.nearest_refuted.is_some() {
            return;
        }
        let Some(plan) = &mut self.nearest else {
            return;
        };
        if let Ok(memory) = memory(&plan.candidate) {
            let memory = fit::with_slack(memory);
            if memory.total() > self.config.memory_limit {
                plan.memory = memory;
            }
        }
    }
}
