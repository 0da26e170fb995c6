//! Searches for the fastest parallel layout of a model on a number of devices.
//!
//! The candidates are all factorizations of the number of devices over the parallel axes. Each is combined with every
//! schedule, micro-batch size, ZeRO stage, sharding group size and kind of recomputation. If a candidate does not fit
//! into memory, the search also tries to offload its optimizer state to the host. This module does not define which
//! candidates are valid: the [`Mesh`](burn_megatron::mesh::Mesh), the model, the layer split, the schedule generator
//! and [`DataParallelConfig`] check each candidate.
//!
//! Candidates are evaluated in the order of a lower bound of their step time: the time of all micro-batches without a
//! pipeline bubble. The search stops when no remaining candidate can be among the best. The remaining candidates are
//! counted, but their times are not computed. The result is deterministic: candidates are evaluated in parallel, in
//! groups whose size does not depend on the number of cores.
//!
//! [`search`] computes memory only with formulas. [`search_confirmed`] also computes the memory of each plan by running
//! the operations of the model without data. If a plan needs too much memory, it is rejected, and the search is
//! repeated for its axis sizes, until all plans fit. The result contains the fastest candidates that fit according to
//! both methods.

mod cache;
mod confirm;
mod entries;
mod pipelines;
mod rank_class;
mod report;
mod space;
mod visit;

use std::collections::HashMap;

use rayon::prelude::*;

use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::ParallelConfig;

use super::fit::StateBytes;
use super::hardware::{Hardware, HardwareError};
use super::time::{ComputeTypes, DeviceRates};
use super::{ModelProfile, Recompute};
use confirm::Refutation;
use entries::{Entry, EntrySource};
use pipelines::Pipelines;
use visit::Visit;

pub use confirm::{MemoryRefusal, OwnMemory};
pub use report::{Plan, Rejection, RejectionCount, SearchCounts, SearchReport};
pub use space::FixedSettings;

/// The interface between a search and a model: the properties of the model that a search needs.
pub trait PlannedModel: Sync {
    /// Returns the number of layers.
    fn layers(&self) -> usize;

    /// Returns whether the model has experts, whose parameters use a separate grid of ranks.
    fn has_experts(&self) -> bool;

    /// Returns the FLOPs per token of the forward and the backward.
    fn flops_per_token(&self) -> f64;

    /// Checks that the layout can split the model and its sequences.
    ///
    /// # Errors
    ///
    /// A message that explains why the layout cannot split them.
    fn check(&self, layout: &ParallelConfig) -> Result<(), String>;

    /// Returns the profile of the model on a rank. The result may depend only on the tensor, context and expert axes of
    /// the layout, and on the micro-batch size.
    ///
    /// # Errors
    ///
    /// A message that explains why the model cannot be profiled.
    fn profile(&self, layout: &ParallelConfig, micro_batch: usize) -> Result<ModelProfile, String>;

    /// Returns the number of bytes of training state per parameter.
    fn state_bytes(&self) -> StateBytes;
}

/// The settings of a search.
#[derive(Clone, Debug)]
pub struct SearchConfig<'a> {
    /// The number of devices.
    pub devices: usize,
    /// The hardware constants of the devices and their links.
    pub hardware: &'a Hardware,
    /// The dtypes of the training run.
    pub types: ComputeTypes,
    /// The number of tokens in a sequence.
    pub sequence: usize,
    /// The global batch size: the number of samples per step over all ranks.
    pub global_batch: usize,
    /// The number of bytes of device memory that a rank may use.
    pub memory_limit: u64,
    /// The data-parallel settings that are not searched.
    pub sharing: DataParallelConfig,
    /// The settings that have a fixed value and are not searched.
    pub fixed: FixedSettings,
    /// The maximum number of plans to return.
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

/// The number of entries that are evaluated in parallel before their results are compared.
const WAVE: usize = 16;

/// The progress of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchProgress {
    /// The number of completed entries. An entry is a combination of a layout, a micro-batch size and a kind of
    /// recomputation. It is completed when all its schedules and shardings were compared.
    pub compared: usize,
    /// The total number of entries.
    pub all: usize,
    /// The number of plans whose memory was computed by running the operations of the model.
    pub confirmed: usize,
}

/// A function that is called with the progress of a search.
pub type ShowProgress<'a> = dyn Fn(SearchProgress) + Sync + 'a;

/// Searches for the fastest layouts of a model. The memory of a layout is computed with formulas.
///
/// # Errors
///
/// [`HardwareError::NoPeak`] if the hardware has no peak throughput for the dtypes of the run.
pub fn search(
    model: &dyn PlannedModel,
    config: &SearchConfig<'_>,
) -> Result<SearchReport, HardwareError> {
    let rates = DeviceRates::new(config.hardware, &config.types)?;
    let mut search = Search::new(model, config, rates, &|_| ());
    search.run();
    Ok(search.report())
}

/// Searches for the fastest layouts of a model, and confirms that each returned plan fits into memory. `memory`
/// computes the memory of a plan by running the operations of the model without data. `progress` is called from time to
/// time.
///
/// # Errors
///
/// See [`search`].
pub fn search_confirmed(
    model: &dyn PlannedModel,
    config: &SearchConfig<'_>,
    memory: &OwnMemory<'_>,
    progress: &ShowProgress<'_>,
) -> Result<SearchReport, HardwareError> {
    let rates = DeviceRates::new(config.hardware, &config.types)?;
    let mut search = Search::new(model, config, rates, progress);
    search.run();
    while search.confirm(memory) {
        search.run();
    }
    search.confirm_nearest(memory);
    Ok(search.report())
}

/// The sizes of the axes: tensor, context, pipeline, expert and expert tensor.
type Sizes = [usize; 5];

fn sizes_of(layout: &ParallelConfig) -> Sizes {
    [
        layout.tensor,
        layout.context,
        layout.pipeline,
        layout.expert,
        layout.expert_tensor_size(),
    ]
}

/// The best plan for a set of axis sizes.
struct Kept {
    plan: Plan,
    /// Whether running the operations of the model has confirmed that the plan fits.
    is_confirmed: bool,
}

/// An entry and the result of its last visit.
struct Visited<'a> {
    entry: Entry<'a>,
    /// `None` if the entry was not visited, or if its visit is no longer valid.
    found: Option<VisitCounts>,
}

/// The counts of one visit of an entry.
struct VisitCounts {
    counts: SearchCounts,
    plans: u64,
}

/// The state of a search.
struct Search<'a> {
    model: &'a dyn PlannedModel,
    config: &'a SearchConfig<'a>,
    rates: DeviceRates<'a>,
    /// The counts of candidates that do not belong to any entry.
    counts: SearchCounts,
    /// All entries, sorted by their bounds. Empty during a run.
    entries: Vec<Visited<'a>>,
    pipelines: Pipelines,
    best: HashMap<Sizes, Kept>,
    /// A plan is among the best only if its time is less than this time.
    worst: f64,
    nearest: Option<Plan>,
    /// Candidates that do not fit according to the operations of the model, keyed by axis sizes.
    refuted: HashMap<Sizes, Vec<Refutation>>,
    nearest_refuted: Option<Plan>,
    confirmed: usize,
    progress: &'a ShowProgress<'a>,
}

impl<'a> Search<'a> {
    fn new(
        model: &'a dyn PlannedModel,
        config: &'a SearchConfig<'a>,
        rates: DeviceRates<'a>,
        progress: &'a ShowProgress<'a>,
    ) -> Self {
        let (mut entries, counts) = EntrySource::new(model, config, &rates).all();
        entries.sort_by(|one, two| one.bound.total_cmp(&two.bound));
        let visited = |entry| Visited { entry, found: None };
        Self {
            model,
            config,
            rates,
            counts,
            entries: entries.into_iter().map(visited).collect(),
            pipelines: Pipelines::default(),
            best: HashMap::new(),
            worst: f64::INFINITY,
            nearest: None,
            refuted: HashMap::new(),
            nearest_refuted: None,
            confirmed: 0,
            progress,
        }
    }

    /// Visits every entry that was not visited and is not slower than the plans found so far.
    fn run(&mut self) {
        let mut entries = std::mem::take(&mut self.entries);
        self.update_worst();
        let all = entries.len();
        let mut rest = entries.iter_mut().enumerate();
        loop {
            // Most entries are slower than the plans found so far.
            let mut wave = vec![];
            let mut compared = all;
            for (number, visited) in rest.by_ref() {
                let Visited { entry, found } = &*visited;
                if found.is_none() && self.is_slower(entry.sizes(), entry.bound).is_none() {
                    wave.push(visited);
                }
                if wave.len() == WAVE {
                    compared = number;
                    break;
                }
            }
            self.show(compared, all);
            if wave.is_empty() {
                break;
            }
            let visits = wave.par_iter().map(|it| Visit::of(self, &it.entry).found());
            let visits: Vec<_> = visits.collect();
            for (visited, found) in wave.into_iter().zip(visits) {
                visited.found = Some(VisitCounts {
                    counts: found.counts,
                    plans: found.plans.len() as u64,
                });
                for plan in found.plans {
                    self.keep(plan);
                }
                found
                    .nearest
                    .into_iter()
                    .for_each(|plan| self.keep_nearest(plan));
            }
            self.update_worst();
        }
        self.entries = entries;
    }

    fn show(&self, compared: usize, all: usize) {
        (self.progress)(SearchProgress {
            compared,
            all,
            confirmed: self.confirmed,
        });
    }

    fn update_worst(&mut self) {
        let best = self.best.values();
        let mut seconds: Vec<_> = best.map(|kept| kept.plan.step.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        let last = self.config.top.checked_sub(1);
        let worst = last.and_then(|last| seconds.get(last));
        self.worst = worst.copied().unwrap_or(f64::INFINITY);
    }

    /// Returns the reason why a candidate with these axis sizes is not among the best plans, if its step takes at least
    /// `seconds`.
    fn is_slower(&self, sizes: Sizes, seconds: f64) -> Option<Rejection> {
        let same = self.best.get(&sizes);
        if same.is_some_and(|kept| seconds >= kept.plan.step.seconds) {
            return Some(Rejection::SameSizes);
        }
        (seconds > self.worst).then_some(Rejection::Slower)
    }

    fn keep(&mut self, plan: Plan) {
        let sizes = plan.sizes();
        let other = self.best.get(&sizes);
        if other.is_none_or(|other| plan.step.seconds < other.plan.step.seconds) {
            let kept = Kept {
                plan,
                is_confirmed: false,
            };
            self.best.insert(sizes, kept);
        }
    }

    /// Keeps a plan that does not fit, if it needs less memory than the other plans that do not fit.
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
        let mut plans = 0;
        for Visited { entry, found } in std::mem::take(&mut self.entries) {
            match found {
                Some(found) => {
                    self.counts.extend(found.counts);
                    plans += found.plans;
                }
                None => {
                    let reason = self.is_slower(entry.sizes(), entry.bound);
                    let reason = reason.unwrap_or(Rejection::Slower);
                    self.counts.add(reason, entry.settings, None);
                }
            }
        }
        let mut best: Vec<_> = self.best.into_values().map(|kept| kept.plan).collect();
        let others = plans.saturating_sub(best.len() as u64);
        self.counts.add(Rejection::SameSizes, others, None);
        report::sort(&mut best);
        let others = best.len().saturating_sub(self.config.top);
        best.truncate(self.config.top);
        self.counts.add(Rejection::Slower, others as u64, None);
        let nearest = self.nearest_refuted.or(self.nearest);
        SearchReport {
            nearest: nearest.filter(|_| best.is_empty()),
            best,
            counts: self.counts,
        }
    }
}
