//! The search over all layouts of a number of devices.
//!
//! Candidates are every factorisation of the devices over the axes, with every schedule, micro-batch, ZeRO stage, sharding
//! group and kind of recomputation. Whether one is valid is asked of [`Mesh`], the model, the split of the layers, the
//! schedule generator and [`DataParallelConfig`]; there are no rules here. They are taken in the order of a lower bound of
//! their time, `m` micro-batches without a bubble, until no other can be among the best: the rest is counted, not timed. The
//! result is deterministic.

mod entries;
mod pipelines;
mod rank_class;
mod report;
mod space;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use crate::data_parallel::DataParallelConfig;
use crate::mesh::stages::StageLayout;
use crate::mesh::{Axis, Grid, Mesh, ParallelConfig};
use crate::pipeline::stages_of;

use super::fit::{self, StateBytes};
use super::hardware::{Hardware, HardwareError};
use super::memory::MemoryByKind;
use super::time::{
    ComputeTypes, DataExchange, DeviceRates, ModelSeconds, PipelineSeconds, layer_bytes,
};
use super::{Candidate, MeshLinks, ModelProfile};
use entries::Entry;
use pipelines::{Pipeline, Pipelines};
use rank_class::RankClass;
use space::{PipelineSettings, ShardingSettings};

pub use report::{Plan, Rejection, RejectionCount, SearchCounts, SearchReport};
pub use space::FixedSettings;

/// What a search knows of a model: one implementation per way of profiling it.
pub trait PlannedModel {
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
    let mut search = Search {
        model,
        config,
        rates,
        counts: SearchCounts::default(),
        pipelines: Pipelines::default(),
        best: HashMap::new(),
        worst: f64::INFINITY,
        nearest: None,
    };
    let mut entries = search.entries();
    entries.sort_by(|one, two| one.bound.total_cmp(&two.bound));
    for entry in &entries {
        search.visit(entry);
    }
    Ok(search.report())
}

/// An entry with its schedule.
struct Timed<'a> {
    entry: &'a Entry,
    links: MeshLinks<'a>,
    layout: ParallelConfig,
    stages: Vec<StageLayout>,
    seconds: PipelineSeconds,
    classes: Vec<RankClass>,
    pipeline: Option<Pipeline>,
}

struct Search<'a> {
    model: &'a dyn PlannedModel,
    config: &'a SearchConfig<'a>,
    rates: DeviceRates<'a>,
    counts: SearchCounts,
    pipelines: Pipelines,
    /// By sizes of the axes.
    best: HashMap<[usize; 5], Plan>,
    /// The time that a plan must beat to be among the best.
    worst: f64,
    nearest: Option<Plan>,
}

/// A rank of the data axes with several stages.
type RankStages<'a> = Vec<(usize, &'a StageLayout)>;

impl Search<'_> {
    /// The schedules and shardings of a layout.
    fn settings(&self, layout: &ParallelConfig) -> u64 {
        let fixed = &self.config.fixed;
        let pipelines = fixed.pipelines(layout.pipeline, self.model.layers()).len();
        let shardings = fixed.shardings(layout.data_parallel_size()).len();
        (pipelines * shardings) as u64
    }

    fn update_worst(&mut self) {
        let mut seconds: Vec<_> = self.best.values().map(|plan| plan.step.seconds).collect();
        if seconds.len() >= self.config.top {
            seconds.sort_by(f64::total_cmp);
            self.worst = report::within_tie(seconds[self.config.top - 1]);
        }
    }

    /// Why a candidate of these sizes that takes at least so long is not among the best.
    fn is_slower(&self, sizes: [usize; 5], seconds: f64) -> Option<Rejection> {
        let same = self.best.get(&sizes);
        if same.is_some_and(|plan| seconds >= plan.step.seconds) {
            return Some(Rejection::SameSizes);
        }
        (seconds > self.worst).then_some(Rejection::Slower)
    }

    /// Times the schedules and shardings of an entry.
    fn visit(&mut self, entry: &Entry) {
        if let Some(reason) = self.is_slower(entry.sizes(), entry.bound) {
            self.counts.add(reason, entry.settings, None);
            return;
        }
        let (layout, config) = (&entry.layout, self.config);
        let shardings = config.fixed.shardings(layout.data_parallel_size());
        let links = MeshLinks::new(&entry.mesh, config.hardware);
        let seconds = ModelSeconds::new(&entry.profile, &self.rates, &links, entry.recompute);
        for settings in config.fixed.pipelines(layout.pipeline, self.model.layers()) {
            let rejected = match self.time(entry, &links, &seconds, settings, &shardings) {
                Ok(timed) => {
                    self.shard(&timed, &shardings);
                    continue;
                }
                Err(rejected) => rejected,
            };
            self.counts
                .add(rejected.0, shardings.len() as u64, rejected.1);
        }
    }

    /// An entry with a schedule: its stages, their times, and what they keep.
    fn time<'a>(
        &mut self,
        entry: &'a Entry,
        links: &MeshLinks<'a>,
        seconds: &ModelSeconds,
        settings: PipelineSettings,
        shardings: &[ShardingSettings],
    ) -> Result<Timed<'a>, (Rejection, Option<String>)> {
        let layers = self.model.layers();
        let layout = with_pipeline(&entry.layout, settings, layers);
        let stages = stages_of(&layout, layers)
            .map_err(|error| (Rejection::Stages, Some(error.to_string())))?;
        let ranks = layout.pipeline;
        let rank_of = |stage| settings.map_or(0, |(kind, _)| kind.rank_of(stage, ranks));
        let device = (&self.rates, links);
        let seconds = seconds.pipeline(&entry.profile, &stages, ranks, rank_of, device);
        let (_, busiest) = seconds.busiest();
        let bound = busiest * entry.micro_batches as f64;
        if let Some(reason) = self.is_slower(entry.sizes(), bound) {
            return Err((reason, None));
        }
        let of_ranks = ranked(&stages, ranks, rank_of);
        let mut classes = RankClass::of_ranks(&entry.profile, &of_ranks, &seconds.ranks);
        let states = shardings.iter().map(|s| self.state(entry, &classes, *s));
        let least = states.map(|ranks| most_of(&ranks)).min().unwrap_or(0);
        if self.is_too_large(least) {
            return Err((Rejection::Memory, None));
        }
        let pipeline = settings
            .map(|_| self.pipelines.get(settings, &layout, entry.micro_batches))
            .transpose()
            .map_err(|error| (Rejection::Schedule, Some(error)))?;
        let bytes: Vec<_> = stages
            .iter()
            .map(|stage| fit::stage_bytes(&entry.profile, stage, entry.recompute))
            .collect();
        for class in &mut classes {
            let working = class.ranks.iter().map(|rank| {
                let kept = match &pipeline {
                    None => bytes.iter().sum(),
                    Some(pipeline) => pipeline.in_flight(*rank, &bytes),
                };
                let has_loss = of_ranks[*rank].iter().any(|(_, stage)| stage.loss);
                fit::working(&entry.profile, entry.recompute, kept, has_loss)
            });
            let most = working.max_by_key(MemoryByKind::total);
            class.working = most.unwrap_or_default();
        }
        Ok(Timed {
            entry,
            links: links.clone(),
            layout,
            seconds,
            classes,
            pipeline,
            stages,
        })
    }

    /// Whether so many bytes are more than there are, and no less than those of the nearest plan.
    fn is_too_large(&self, bytes: u64) -> bool {
        let nearest = self.nearest.as_ref().map(|plan| plan.memory.total());
        let is_nearer = self.best.is_empty() && nearest.is_none_or(|nearest| bytes < nearest);
        bytes > self.config.memory_limit && !is_nearer
    }

    /// The state of a rank of each class with a sharding.
    fn state(
        &self,
        entry: &Entry,
        classes: &[RankClass],
        (stage, group): ShardingSettings,
    ) -> Vec<MemoryByKind> {
        let sharing = DataParallelConfig {
            zero_stage: stage,
            hsdp: group,
            ..DataParallelConfig::default()
        };
        let shards = data_sizes(&entry.mesh).map(|ranks| sharing.shard_ranks(ranks));
        let bytes = self.model.state_bytes();
        let states = classes.iter();
        states
            .map(|class| fit::sharded_state(&class.elements, shards, stage, bytes))
            .collect()
    }

    /// Tries the shardings of a schedule.
    fn shard(&mut self, timed: &Timed<'_>, shardings: &[ShardingSettings]) {
        let Timed { entry, .. } = timed;
        let mut total = None;
        for sharding in shardings {
            let layout = ParallelConfig {
                zero_stage: sharding.0,
                hsdp: sharding.1,
                ..timed.layout.clone()
            };
            let candidate = Candidate {
                layout,
                micro_batch: entry.micro_batch,
                micro_batches: entry.micro_batches,
                recompute: entry.recompute,
            };
            let sharing = candidate.sharing(&self.config.sharing);
            let checks = data_sizes(&entry.mesh).map(|ranks| sharing.check(ranks));
            if let Some(error) = checks.into_iter().find_map(Result::err) {
                self.counts
                    .add(Rejection::Sharding, 1, Some(error.to_string()));
                continue;
            }
            let states = self.state(entry, &timed.classes, *sharding);
            let classes = states.iter().zip(&timed.classes);
            let ranks = classes.map(|(state, class)| fit::with_slack(*state + class.working));
            let memory = ranks.max_by_key(MemoryByKind::total).unwrap_or_default();
            let fits = memory.total() <= self.config.memory_limit;
            if self.is_too_large(memory.total()) {
                self.counts.add(Rejection::Memory, 1, None);
                continue;
            }
            let data = self.data(timed, &sharing);
            let (_, busiest) = timed.seconds.busiest();
            let added = data.waited + data.optimizer;
            let bound = busiest * entry.micro_batches as f64 + added;
            let slower = self.is_slower(entry.sizes(), bound).filter(|_| fits);
            if let Some(reason) = slower {
                self.counts.add(reason, 1, None);
                continue;
            }
            let total = *total.get_or_insert_with(|| timed.total());
            let plan = self.plan(timed, candidate, memory, &data, total);
            self.keep(plan, fits);
        }
    }

    fn keep(&mut self, plan: Plan, fits: bool) {
        if !fits {
            self.counts.add(Rejection::Memory, 1, None);
            self.nearest = Some(plan);
            return;
        }
        let sizes = plan.sizes();
        let other = self.best.get(&sizes);
        if other.is_some_and(|other| other.step.seconds <= plan.step.seconds) {
            self.counts.add(Rejection::SameSizes, 1, None);
            return;
        }
        if self.best.insert(sizes, plan).is_some() {
            self.counts.add(Rejection::SameSizes, 1, None);
        }
        self.update_worst();
    }

    /// What the data axis adds: of the rank for which it is the most.
    fn data(&self, timed: &Timed<'_>, sharing: &DataParallelConfig) -> DataExchange {
        let [dense, expert] = data_sizes(&timed.entry.mesh);
        let groups = [(Grid::Dense, dense), (Grid::Expert, expert)];
        let groups =
            groups.map(|(grid, ranks)| timed.links.sharding(grid, sharing.shard_ranks(ranks)));
        let of_classes = timed.classes.iter().map(|class| {
            DataExchange::new(
                class.elements.parameters,
                &groups,
                &class.seconds,
                timed.entry.micro_batches,
                sharing,
                self.config.types.parameter_bytes,
                &self.rates,
            )
        });
        let seconds = |data: &DataExchange| data.waited + data.optimizer;
        let most = of_classes.max_by(|one, two| seconds(one).total_cmp(&seconds(two)));
        most.unwrap_or_default()
    }

    fn plan(
        &self,
        timed: &Timed<'_>,
        candidate: Candidate,
        memory: MemoryByKind,
        data: &DataExchange,
        total: f64,
    ) -> Plan {
        let entry = timed.entry;
        let mut bytes = timed.bytes();
        data.add_to(&mut bytes);
        let step = timed.seconds.step(total, entry.micro_batches, data, bytes);
        let tokens = (self.config.global_batch * self.config.sequence) as f64;
        let tokens_per_second = tokens / step.seconds;
        let peak = self.rates.peak() * self.config.devices as f64;
        Plan {
            mfu: tokens_per_second * self.model.flops_per_token() / peak,
            candidate,
            step,
            memory,
            tokens_per_second,
        }
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

impl Timed<'_> {
    /// The seconds of all micro-batches in the pipeline.
    fn total(&self) -> f64 {
        let times = self.seconds.stage_times();
        let micro_batches = self.entry.micro_batches;
        let Some(pipeline) = &self.pipeline else {
            let (_, busy) = self.seconds.busiest();
            return busy * micro_batches as f64;
        };
        // Times of a profile are finite.
        pipeline.seconds(&times).unwrap_or(f64::INFINITY)
    }

    /// The bytes of the rank that sends the most in its layers.
    fn bytes(&self) -> super::AxisBytes {
        let ranks = self.layout.pipeline;
        let kind = self.layout.schedule.clone().unwrap_or_default();
        let rank_of = |stage| match &kind {
            crate::mesh::ScheduleSource::Kind(kind) => kind.rank_of(stage, ranks),
            crate::mesh::ScheduleSource::File(_) => 0,
        };
        let of_ranks = ranked(&self.stages, ranks, rank_of);
        let bytes = of_ranks.iter().map(|own| {
            let own: Vec<_> = own.iter().map(|(_, stage)| *stage).collect();
            let entry = self.entry;
            let (micro_batches, recompute) = (entry.micro_batches, entry.recompute);
            layer_bytes(&entry.profile, &own, ranks, micro_batches, recompute)
        });
        let most = bytes.max_by(|one, two| one.total().total_cmp(&two.total()));
        most.unwrap_or_default()
    }
}

/// By rank of the pipeline, its stages with their numbers.
fn ranked(
    stages: &[StageLayout],
    ranks: usize,
    rank_of: impl Fn(usize) -> usize,
) -> Vec<RankStages<'_>> {
    let mut of_ranks = vec![vec![]; ranks];
    for (index, stage) in stages.iter().enumerate() {
        of_ranks[rank_of(index)].push((index, stage));
    }
    of_ranks
}

/// The bytes of the rank that needs the most, with slack.
fn most_of(ranks: &[MemoryByKind]) -> u64 {
    let totals = ranks.iter().map(|rank| fit::with_slack(*rank).total());
    totals.max().unwrap_or(0)
}

/// The ranks of the data axes of the dense and the expert grid.
fn data_sizes(mesh: &Mesh) -> [usize; 2] {
    let dense = mesh.size(Grid::Dense, Axis::Data) * mesh.size(Grid::Dense, Axis::Context);
    [dense, mesh.size(Grid::Expert, Axis::Data)]
}

/// The layout with a schedule and a split of the layers.
fn with_pipeline(
    layout: &ParallelConfig,
    settings: PipelineSettings,
    layers: usize,
) -> ParallelConfig {
    let layout = layout.clone();
    let Some((kind, stages)) = settings else {
        return layout;
    };
    let split = space::split(layers, stages * layout.pipeline);
    let layout = layout.with_schedule(kind).with_split(split);
    if stages == kind.default_virtual_stages() {
        layout
    } else {
        layout.with_virtual_stages(stages)
    }
}
