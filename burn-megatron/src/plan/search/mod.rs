//! The search over all layouts of a number of devices.
//!
//! Candidates are every factorisation of the devices over the axes, with every schedule, micro-batch, ZeRO stage, sharding
//! group and kind of recomputation; what does not fit is tried with optimizer state on the host. Whether one is valid is asked of [`Mesh`](crate::mesh::Mesh), the model, the split of the layers, the
//! schedule generator and [`DataParallelConfig`]; there are no rules here. They are taken in the order of a lower bound of
//! their time, `m` micro-batches without a bubble, until no other can be among the best: the rest is counted, not timed. The
//! result is deterministic: entries are timed in parallel, so many at once whatever the number of cores.

mod cache;
mod entries;
mod pipelines;
mod rank_class;
mod report;
mod space;
#[cfg(test)]
mod tests;
mod visit;

use std::collections::HashMap;

use rayon::prelude::*;

use crate::data_parallel::DataParallelConfig;
use crate::mesh::ParallelConfig;

use super::fit::StateBytes;
use super::hardware::{Hardware, HardwareError};
use super::time::{ComputeTypes, DeviceRates};
use super::{ModelProfile, Recompute};
use entries::EntrySource;
use pipelines::Pipelines;
use visit::Visit;

pub use report::{Plan, Rejection, RejectionCount, SearchCounts, SearchReport};
pub use space::FixedSettings;

/// What a search knows of a model: one implementation per way of profiling it.
pub trait PlannedModel: Sync {
    /// The number of layers.
    fn layers(&self) -> usize;

    /// Whether it has experts, which lie on a grid of their own.
    fn has_experts(&self) -> bool;

    /// Operations of forward and backward per token.
    fn flops_per_token(&self) -> f64;

    /// Whether the model and its sequences can be split so.
    ///
    /// # Errors
    ///
    /// Why they cannot.
    fn check(&self, layout: &ParallelConfig) -> Result<(), String>;

    /// The profile of a rank, which depends on the tensor, context and expert axes of the layout alone.
    ///
    /// # Errors
    ///
    /// Why the model cannot be profiled so.
    fn profile(&self, layout: &ParallelConfig, micro_batch: usize) -> Result<ModelProfile, String>;

    /// Bytes of state per parameter.
    fn state_bytes(&self) -> StateBytes;
}

/// What is searched for.
#[derive(Clone, Debug)]
pub struct SearchConfig<'a> {
    /// The devices.
    pub devices: usize,
    /// What a device computes and exchanges.
    pub hardware: &'a Hardware,
    /// The types of the run.
    pub types: ComputeTypes,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Samples of a step.
    pub global_batch: usize,
    /// Bytes that a rank may use.
    pub memory_limit: u64,
    /// The settings of data parallelism that are not searched.
    pub sharing: DataParallelConfig,
    /// The settings that are given.
    pub fixed: FixedSettings,
    /// The number of plans that are returned.
    pub top: usize,
}

impl SearchConfig<'_> {
    fn has_host(&self) -> bool {
        self.hardware.host.is_some()
    }

    fn recomputes(&self) -> Vec<Recompute> {
        self.fixed.recomputes(self.has_host())
    }

    fn offloads(&self) -> &[f64] {
        self.fixed.offloads(self.has_host())
    }
}

/// Entries that are timed before any of them is compared with the next ones.
const WAVE: usize = 16;

/// Searches the layouts of a model.
///
/// # Errors
///
/// [`HardwareError::NoPeak`] if the device does not compute in the types of the run.
pub fn search(
    model: &dyn PlannedModel,
    config: &SearchConfig<'_>,
) -> Result<SearchReport, HardwareError> {
    let rates = DeviceRates::new(config.hardware, &config.types)?;
    let (mut entries, counts) = EntrySource::new(model, config, &rates).all();
    entries.sort_by(|one, two| one.bound.total_cmp(&two.bound));
    let mut search = Search {
        model,
        config,
        rates,
        counts,
        pipelines: Pipelines::default(),
        best: HashMap::new(),
        worst: f64::INFINITY,
        nearest: None,
    };
    let mut entries = entries.iter();
    loop {
        // Most entries are slower than what was found.
        let mut wave = vec![];
        for entry in entries.by_ref() {
            match search.is_slower(entry.sizes(), entry.bound) {
                Some(reason) => search.counts.add(reason, entry.settings, None),
                None => wave.push(entry),
            }
            if wave.len() == WAVE {
                break;
            }
        }
        if wave.is_empty() {
            break;
        }
        let visits = wave.into_par_iter().map(|entry| Visit::of(&search, entry));
        let visits: Vec<_> = visits.map(Visit::found).collect();
        for found in visits {
            search.counts.extend(found.counts);
            for plan in found.plans {
                search.keep(plan);
            }
            found
                .nearest
                .into_iter()
                .for_each(|plan| search.keep_nearest(plan));
        }
        search.update_worst();
    }
    Ok(search.report())
}

/// Sizes of the axes: tensor, context, pipeline, expert, expert-tensor.
type Sizes = [usize; 5];

/// What a search has found so far.
struct Search<'a> {
    model: &'a dyn PlannedModel,
    config: &'a SearchConfig<'a>,
    rates: DeviceRates<'a>,
    counts: SearchCounts,
    pipelines: Pipelines,
    best: HashMap<Sizes, Plan>,
    /// The time that a plan must beat to be among the best.
    worst: f64,
    nearest: Option<Plan>,
}

impl Search<'_> {
    fn update_worst(&mut self) {
        let mut seconds: Vec<_> = self.best.values().map(|plan| plan.step.seconds).collect();
        if seconds.len() >= self.config.top {
            seconds.sort_by(f64::total_cmp);
            self.worst = report::within_tie(seconds[self.config.top - 1]);
        }
    }

    /// Why a candidate of these sizes that takes at least so long is not among the best.
    fn is_slower(&self, sizes: Sizes, seconds: f64) -> Option<Rejection> {
        let same = self.best.get(&sizes);
        if same.is_some_and(|plan| seconds >= plan.step.seconds) {
            return Some(Rejection::SameSizes);
        }
        (seconds > self.worst).then_some(Rejection::Slower)
    }

    fn keep(&mut self, plan: Plan) {
        let sizes = plan.sizes();
        let other = self.best.get(&sizes);
        if other.is_some_and(|other| other.step.seconds <= plan.step.seconds) {
            self.counts.add(Rejection::SameSizes, 1, None);
            return;
        }
        if self.best.insert(sizes, plan).is_some() {
            self.counts.add(Rejection::SameSizes, 1, None);
        }
    }

    /// Keeps a plan that does not fit, if it needs less than the others.
    fn keep_nearest(&mut self, plan: Plan) {
        if self
            .nearest_bytes()
            .is_none_or(|bytes| plan.memory.total() < bytes)
        {
            self.nearest = Some(plan);
        }
    }

    fn nearest_bytes(&self) -> Option<u64> {
        self.nearest.as_ref().map(|plan| plan.memory.total())
    }

    fn report(mut self) -> SearchReport {
        let mut best: Vec<_> = self.best.into_values().collect();
        report::sort(&mut best);
        let others = best.len().saturating_sub(self.config.top);
        best.truncate(self.config.top);
        self.counts.add(Rejection::Slower, others as u64, None);
        SearchReport {
            nearest: self.nearest.filter(|_| best.is_empty()),
            best,
            counts: self.counts,
        }
    }
}
