//! Tries the shardings of a timed schedule.

use super::super::super::fit;
use super::super::super::memory::MemoryByKind;
use super::super::super::time::{DataExchange, StateSharing, layer_bytes};
use super::super::super::{AxisBytes, Candidate};
use super::super::confirm::{Group, Refutation};
use super::super::entries::Entry;
use super::super::rank_class::RankClass;
use super::super::space::ShardingSettings;
use super::super::{Plan, Rejection, Search, SearchConfig};
use super::Visit;
use super::timed::{Timed, ranked};
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::{Axis, Grid, Mesh, ParallelConfig, ScheduleSource};

/// A sharding, with the share of the optimizer state that is offloaded to the host.
#[derive(Default)]
struct Offloaded<'s> {
    share: f64,
    fits: bool,
    /// The refutation that rejects this share although it fits according to the formulas.
    refuted: Option<&'s Refutation>,
    memory: MemoryByKind,
}

/// The memory that a rank needs.
#[derive(Default)]
pub(super) struct Needed {
    pub(super) device: MemoryByKind,
    /// Bytes on the host.
    host: u64,
}

impl Needed {
    /// Returns the memory of the class of ranks that needs the most, if the share `offload` of the optimizer state is
    /// on the host.
    pub(super) fn new(classes: &[RankClass], states: &[MemoryByKind], offload: f64) -> Self {
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

impl<'s> Visit<'s> {
    fn fits(&self, needed: &Needed) -> bool {
        let SearchConfig {
            hardware,
            memory_limit,
            ..
        } = self.search.config;
        let host = hardware.host.map_or(u64::MAX, |host| host.memory);
        needed.device.total() <= *memory_limit && needed.host <= host
    }

    /// Returns the smallest share of the optimizer state on the host with which a sharding fits, or the largest share
    /// if none fits.
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

    /// Tries the shardings of a schedule. Returns the shardings that do not fit with the whole optimizer state on the
    /// device.
    pub(super) fn shard(
        &mut self,
        timed: &Timed,
        shardings: &[ShardingSettings],
    ) -> Vec<ShardingSettings> {
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
            // A plan that exceeds only the memory of the host also counts as too large.
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

    /// Returns the data-parallel communication of the rank for which it takes the longest.
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

    /// Returns the time of all micro-batches in the pipeline, in seconds.
    fn total(&self, timed: &Timed) -> f64 {
        let Search { config, rates, .. } = self.search;
        let micro_batches = self.entry.micro_batches;
        let seconds = match &timed.pipeline {
            None => timed.seconds.bound(rates, micro_batches),
            // The times of a profile are finite.
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

    /// Returns the number of bytes that the layers of a rank send, for the rank that sends the most.
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

/// Returns the sizes of the data axes of the dense and the expert grid.
pub(super) fn data_sizes(mesh: &Mesh) -> [usize; 2] {
    let dense = mesh.size(Grid::Dense, Axis::Data) * mesh.size(Grid::Dense, Axis::Context);
    [dense, mesh.size(Grid::Expert, Axis::Data)]
}
