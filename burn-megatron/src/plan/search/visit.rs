//! The schedules and shardings of one entry, against what the search has found so far.

use std::sync::Arc;

use crate::data_parallel::DataParallelConfig;
use crate::mesh::stages::StageLayout;
use crate::mesh::{Axis, Grid, Mesh, ParallelConfig, ScheduleSource};

use super::super::fit;
use super::super::memory::MemoryByKind;
use super::super::time::{DataExchange, ModelSeconds, PipelineSeconds, StateSharing, layer_bytes};
use super::super::{AxisBytes, Candidate, Recompute};
use super::confirm::{Group, Refutation};
use super::entries::Entry;
use super::pipelines::Pipeline;
use super::rank_class::RankClass;
use super::space::{self, PipelineSettings, ShardingSettings};
use super::{Plan, Rejection, Search, SearchConfig, SearchCounts, Sizes};

/// What a visit found.
#[derive(Default)]
pub(super) struct Found {
    pub counts: SearchCounts,
    /// Those that fit.
    pub plans: Vec<Plan>,
    /// Where no plan fits yet, the one that needs the least memory.
    pub nearest: Option<Plan>,
}

/// The visit of an entry.
pub(super) struct Visit<'s> {
    search: &'s Search<'s>,
    entry: &'s Entry<'s>,
    sizes: Sizes,
    found: Found,
    /// The seconds of the fastest plan that it found.
    fastest: f64,
}

/// An entry with its schedule.
struct Timed {
    settings: PipelineSettings,
    recompute: Recompute,
    /// By sharding and class.
    states: Vec<Vec<MemoryByKind>>,
    layout: ParallelConfig,
    stages: Arc<Vec<StageLayout>>,
    seconds: PipelineSeconds,
    classes: Vec<RankClass>,
    pipeline: Option<Pipeline>,
}

/// A sharding with a share of the optimizer state on the host.
#[derive(Default)]
struct Offloaded<'s> {
    share: f64,
    fits: bool,
    /// The refutation of a share that fits by the formulas.
    refuted: Option<&'s Refutation>,
    memory: MemoryByKind,
}

/// What a rank needs.
#[derive(Default)]
struct Needed {
    device: MemoryByKind,
    /// Bytes on the host.
    host: u64,
}

impl Needed {
    /// The most that a rank of any class needs, with a share of the optimizer state on the host.
    fn new(classes: &[RankClass], states: &[MemoryByKind], offload: f64) -> Self {
        let mut most = Self::default();
        for (class, state) in classes.iter().zip(states) {
            let on_host = (state.optimizer as f64 * offload) as u64;
            let state = MemoryByKind {
                optimizer: state.optimizer - on_host,
                ..*state
            };
            let device = fit::with_slack(state + class.working);
            if device.total() > most.device.total() {
                most.device = device;
            }
            most.host = most.host.max(on_host + class.on_host);
        }
        most
    }
}

/// A rank of the data axes with several stages.
pub(super) type RankStages<'a> = Vec<(usize, &'a StageLayout)>;

impl<'s> Visit<'s> {
    /// Times the schedules and shardings of an entry that is not slower than what the search has found.
    pub fn of(search: &'s Search<'s>, entry: &'s Entry<'s>) -> Self {
        let mut visit = Self {
            search,
            entry,
            sizes: entry.sizes(),
            found: Found::default(),
            fastest: f64::INFINITY,
        };
        visit.run();
        visit
    }

    pub fn found(self) -> Found {
        self.found
    }

    fn run(&mut self) {
        let (entry, search) = (self.entry, self.search);
        let (layout, fixed) = (&entry.layout, &search.config.fixed);
        let mut refuted = search.refuted.get(&self.sizes).into_iter().flatten();
        let why =
            refuted.find_map(|it| it.refuses_model(layout.sequence_parallel, entry.micro_batch));
        if let Some(why) = why {
            let counts = &mut self.found.counts;
            counts.add(Rejection::Unplanned, entry.settings, Some(why.into()));
            return;
        }
        let shardings = fixed.shardings(layout.data_parallel_size());
        let seconds = ModelSeconds::new(&entry.profile, &search.rates, &entry.links);
        let recomputed = |recompute| {
            let hardware = search.config.hardware;
            (
                recompute,
                seconds.recomputed(recompute, &entry.profile, hardware),
            )
        };
        let first = recomputed(entry.recompute);
        let offloaded = entry
            .with_offloaded
            .then(|| recomputed(Recompute::FullOffloaded));
        for settings in fixed.pipelines(layout.pipeline, search.model.layers()) {
            let (rest, reason) = self.schedule(&first, settings, &shardings);
            let Some(offloaded) = &offloaded else {
                continue;
            };
            let others = (shardings.len() - rest.len()) as u64;
            self.found.counts.add(reason, others, None);
            self.schedule(offloaded, settings, &rest);
        }
    }

    /// Times a schedule with its shardings. Returns those that do not fit with all optimizer state on the device, and why
    /// the others are not timed with activations on the host.
    fn schedule(
        &mut self,
        seconds: &(Recompute, ModelSeconds),
        settings: PipelineSettings,
        shardings: &[ShardingSettings],
    ) -> (Vec<ShardingSettings>, Rejection) {
        if shardings.is_empty() {
            return (vec![], Rejection::SameSizes);
        }
        match self.time(seconds, settings, shardings) {
            // That is no faster, where both fit.
            Ok(timed) => (self.shard(&timed, shardings), Rejection::SameSizes),
            Err((reason, text)) => {
                let counts = &mut self.found.counts;
                counts.add(reason, shardings.len() as u64, text);
                let is_too_large = reason == Rejection::Memory;
                let rest = if is_too_large { shardings } else { &[] };
                (rest.to_vec(), reason)
            }
        }
    }

    /// Why a candidate that takes at least so long is not among the best.
    fn is_slower(&self, seconds: f64) -> Option<Rejection> {
        if seconds >= self.fastest {
            return Some(Rejection::SameSizes);
        }
        self.search.is_slower(self.sizes, seconds)
    }

    /// Whether so many bytes are more than there are, and no less than those of the nearest plan.
    fn is_too_large(&self, bytes: u64) -> bool {
        let none_fits = self.search.best.is_empty() && self.found.plans.is_empty();
        let own = self.found.nearest.as_ref().map(|plan| plan.memory.total());
        let nearest = own.into_iter().chain(self.search.nearest_bytes()).min();
        let is_nearer = none_fits && nearest.is_none_or(|nearest| bytes < nearest);
        bytes > self.search.config.memory_limit && !is_nearer
    }

    /// The entry with a schedule: its stages, their times, and what they keep.
    fn time(
        &self,
        (recompute, seconds): &(Recompute, ModelSeconds),
        settings: PipelineSettings,
        shardings: &[ShardingSettings],
    ) -> Result<Timed, (Rejection, Option<String>)> {
        let (entry, search) = (self.entry, self.search);
        let profile = &*entry.profile;
        let layers = search.model.layers();
        let layout = with_pipeline(&entry.layout, settings, layers);
        if layout.overlap_moe_expert_parallel_comm {
            let reason = |text: &str| Err((Rejection::Schedule, Some(text.into())));
            if entry.micro_batches < 2 {
                return reason("one micro-batch has no other to overlap with");
            }
            if recompute.is_full() {
                return reason("layers that are computed again have no exchanges to overlap");
            }
        }
        let stages = search.pipelines.stages(settings, &layout, layers);
        let stages = stages.map_err(|error| (Rejection::Stages, Some(error)))?;
        let ranks = layout.pipeline;
        let rank_of = |stage| settings.map_or(0, |(kind, _)| kind.rank_of(stage, ranks));
        let device = (&search.rates, &*entry.links);
        let seconds = seconds.pipeline(profile, &stages, ranks, rank_of, device);
        let mut bound = seconds.bound(&search.rates, entry.micro_batches);
        // Ranks that share cores may take less time than the simulator says.
        if search.config.hardware.cores.is_none() {
            bound = bound.max(seconds.path(rank_of));
        }
        if let Some(reason) = self.is_slower(bound) {
            return Err((reason, None));
        }
        let of_ranks = ranked(&stages, ranks, rank_of);
        let mut classes = RankClass::of_ranks(profile, &of_ranks, &seconds.ranks);
        let offload = search.config.offloads().last().copied().unwrap_or(0.0);
        let states = self.states(&classes, shardings);
        let least = states.iter().map(|states| {
            let needed = Needed::new(&classes, states, offload);
            needed.device.total()
        });
        if self.is_too_large(least.min().unwrap_or(0)) {
            return Err((Rejection::Memory, None));
        }
        let pipeline = settings
            .map(|_| search.pipelines.get(settings, &layout, entry.micro_batches))
            .transpose()
            .map_err(|error| (Rejection::Schedule, Some(error)))?;
        self.add_working(
            &mut classes,
            *recompute,
            &stages,
            &of_ranks,
            pipeline.as_ref(),
        );
        Ok(Timed {
            settings,
            recompute: *recompute,
            states,
            layout,
            seconds,
            classes,
            pipeline,
            stages,
        })
    }

    /// Adds what the ranks hold beside their state.
    fn add_working(
        &self,
        classes: &mut [RankClass],
        recompute: Recompute,
        stages: &[StageLayout],
        of_ranks: &[RankStages<'_>],
        pipeline: Option<&Pipeline>,
    ) {
        let profile = &*self.entry.profile;
        let kept = stages
            .iter()
            .map(|it| fit::stage_bytes(profile, it, recompute));
        let on_host = stages
            .iter()
            .map(|it| fit::host_bytes(profile, it, recompute));
        let [kept, on_host]: [Vec<_>; 2] = [kept.collect(), on_host.collect()];
        let in_flight = |rank: usize, bytes: &[u64]| match pipeline {
            // A pair has two micro-batches.
            None if self.entry.layout.overlap_moe_expert_parallel_comm => {
                2 * bytes.iter().sum::<u64>()
            }
            None => bytes.iter().sum(),
            Some(pipeline) => pipeline.in_flight(rank, bytes),
        };
        let layout = &self.entry.layout;
        let neighbours = layout.pipeline.saturating_sub(1).min(2);
        let ahead = (neighbours * layout.receives_ahead()) as u64 * profile.message_bytes();
        for class in classes {
            let working = class.ranks.iter().map(|rank| {
                let has_loss = of_ranks[*rank].iter().any(|(_, stage)| stage.loss);
                let kept = in_flight(*rank, &kept) + ahead;
                fit::working(profile, recompute, kept, has_loss)
            });
            class.working = working.max_by_key(MemoryByKind::total).unwrap_or_default();
            if recompute == Recompute::FullOffloaded {
                let on_host = class.ranks.iter().map(|rank| in_flight(*rank, &on_host));
                class.on_host = on_host.max().unwrap_or(0);
            }
        }
    }

    /// By sharding, the state of the ranks of each class.
    fn states(
        &self,
        classes: &[RankClass],
        shardings: &[ShardingSettings],
    ) -> Vec<Vec<MemoryByKind>> {
        let data = data_sizes(self.entry.links.mesh());
        let bytes = self.search.model.state_bytes();
        let of = |(stage, hsdp): &ShardingSettings| {
            let sharing = DataParallelConfig {
                zero_stage: *stage,
                hsdp: *hsdp,
                ..DataParallelConfig::default()
            };
            let shards = data.map(|ranks| sharing.shard_ranks(ranks));
            let classes = classes.iter();
            let states =
                classes.map(|class| fit::sharded_state(&class.elements, shards, *stage, bytes));
            states.collect()
        };
        shardings.iter().map(of).collect()
    }

    fn fits(&self, needed: &Needed) -> bool {
        let SearchConfig {
            hardware,
            memory_limit,
            ..
        } = self.search.config;
        let host = hardware.host.map_or(u64::MAX, |host| host.memory);
        needed.device.total() <= *memory_limit && needed.host <= host
    }

    /// The smallest share of the optimizer state on the host with which a sharding fits, or the largest share if none fits.
    fn offload(
        &self,
        timed: &Timed,
        sharding: ShardingSettings,
        states: &[MemoryByKind],
    ) -> Offloaded<'s> {
        let group = Group {
            sequence_parallel: timed.layout.sequence_parallel,
            pipeline: timed.settings,
            micro_batch: self.entry.micro_batch,
            recompute: timed.recompute,
        };
        let refuted = self.search.refuted.get(&self.sizes);
        let limit = self.search.config.memory_limit;
        let mut found = Offloaded::default();
        for offload in self.search.config.offloads() {
            let needed = Needed::new(&timed.classes, states, *offload);
            let (of, bytes) = ((sharding, *offload), needed.device.total());
            let mut refuted = refuted.into_iter().flatten();
            let fits = self.fits(&needed);
            let refuted = refuted.find(|it| fits && it.refutes(&group, of, bytes, limit));
            found = Offloaded {
                share: *offload,
                fits: fits && refuted.is_none(),
                refuted: refuted.or(found.refuted),
                memory: needed.device,
            };
            if found.fits {
                break;
            }
        }
        found
    }

    /// Tries the shardings of a schedule; returns those that do not fit with all optimizer state on the device.
    fn shard(&mut self, timed: &Timed, shardings: &[ShardingSettings]) -> Vec<ShardingSettings> {
        let (mut total, mut rest) = (None, vec![]);
        let mesh = self.entry.links.mesh();
        for (sharding, states) in shardings.iter().zip(&timed.states) {
            let Offloaded {
                share: offload,
                fits,
                refuted,
                memory,
            } = self.offload(timed, *sharding, states);
            if offload > 0.0 || !fits {
                rest.push(*sharding);
            }
            if let Some(refuted) = refuted.filter(|_| !fits) {
                refuted.count(&mut self.found.counts);
                continue;
            }
            // A plan that is too large for the host alone counts as too large for the device.
            if !fits && self.is_too_large(memory.total().max(self.search.config.memory_limit + 1)) {
                self.found.counts.add(Rejection::Memory, 1, None);
                continue;
            }
            let candidate = self.candidate(timed, *sharding, offload);
            let sharing = candidate.sharing(&self.search.config.sharing);
            let checks = data_sizes(mesh).map(|ranks| sharing.check(ranks));
            if let Some(error) = checks.into_iter().find_map(Result::err) {
                let text = Some(error.to_string());
                self.found.counts.add(Rejection::Sharding, 1, text);
                continue;
            }
            let data = self.data(timed, &sharing, offload);
            let added = data.waited + data.optimizer;
            let (rates, micro_batches) = (&self.search.rates, self.entry.micro_batches);
            let bound = timed.seconds.bound(rates, micro_batches) + added;
            if let Some(reason) = self.is_slower(bound).filter(|_| fits) {
                self.found.counts.add(reason, 1, None);
                continue;
            }
            let total = *total.get_or_insert_with(|| self.total(timed));
            let plan = self.plan(timed, candidate, memory, &data, total);
            if fits {
                self.fastest = self.fastest.min(plan.step.seconds);
                self.found.plans.push(plan);
            } else {
                self.found.counts.add(Rejection::Memory, 1, None);
                self.found.nearest = Some(plan);
            }
        }
        rest
    }

    fn candidate(&self, timed: &Timed, sharding: ShardingSettings, offload: f64) -> Candidate {
        Candidate {
            layout: ParallelConfig {
                zero_stage: sharding.0,
                hsdp: sharding.1,
                ..timed.layout.clone()
            },
            micro_batch: self.entry.micro_batch,
            micro_batches: self.entry.micro_batches,
            recompute: timed.recompute,
            offload,
        }
    }

    /// What the data axis adds: of the rank for which it is the most.
    fn data(&self, timed: &Timed, sharing: &DataParallelConfig, offloaded: f64) -> DataExchange {
        let (entry, search) = (self.entry, self.search);
        let [dense, expert] = data_sizes(entry.links.mesh());
        let groups = [(Grid::Dense, dense), (Grid::Expert, expert)];
        let groups =
            groups.map(|(grid, ranks)| entry.links.sharding(grid, sharing.shard_ranks(ranks)));
        let state = StateSharing {
            data: sharing,
            parameter_bytes: search.config.types.parameter_bytes,
            offloaded,
        };
        let of_classes = timed.classes.iter().map(|class| {
            DataExchange::new(
                class.elements.parameters,
                &groups,
                &class.seconds,
                entry.micro_batches,
                state,
                &search.rates,
            )
        });
        let seconds = |data: &DataExchange| data.waited + data.optimizer;
        let most = of_classes.max_by(|one, two| seconds(one).total_cmp(&seconds(two)));
        most.unwrap_or_default()
    }

    fn plan(
        &self,
        timed: &Timed,
        candidate: Candidate,
        memory: MemoryByKind,
        data: &DataExchange,
        total: f64,
    ) -> Plan {
        let Search { config, rates, .. } = self.search;
        let mut bytes = self.bytes(timed);
        data.add_to(&mut bytes);
        let micro_batches = self.entry.micro_batches;
        let step = timed.seconds.step(total, micro_batches, data, bytes, rates);
        let tokens = (config.global_batch * config.sequence) as f64;
        let tokens_per_second = tokens / step.seconds;
        let peak = rates.peak() * config.devices as f64;
        Plan {
            mfu: tokens_per_second * self.search.model.flops_per_token() / peak,
            candidate,
            step,
            memory,
            tokens_per_second,
        }
    }

    /// The seconds of all micro-batches in the pipeline.
    fn total(&self, timed: &Timed) -> f64 {
        let Search { config, rates, .. } = self.search;
        let micro_batches = self.entry.micro_batches;
        let seconds = match &timed.pipeline {
            None => timed.seconds.bound(rates, micro_batches),
            // Times of a profile are finite.
            Some(pipeline) => {
                let times = timed.seconds.stage_times();
                pipeline.seconds(&times).unwrap_or(f64::INFINITY)
            }
        };
        let hardware = config.hardware;
        timed
            .seconds
            .on_cores(seconds, micro_batches, hardware, config.devices)
    }

    /// The bytes of the rank that sends the most in its layers.
    fn bytes(&self, timed: &Timed) -> AxisBytes {
        let ranks = timed.layout.pipeline;
        let kind = timed.layout.schedule.clone().unwrap_or_default();
        let rank_of = |stage| match &kind {
            ScheduleSource::Kind(kind) => kind.rank_of(stage, ranks),
            ScheduleSource::File(_) => 0,
        };
        let of_ranks = ranked(&timed.stages, ranks, rank_of);
        let Entry {
            profile,
            micro_batches,
            ..
        } = self.entry;
        let bytes = of_ranks.iter().map(|own| {
            let own: Vec<_> = own.iter().map(|(_, stage)| *stage).collect();
            layer_bytes(profile, &own, ranks, *micro_batches, timed.recompute)
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
