//! Compares the schedules and shardings of one entry with the results of the search so far.

mod sharded;
mod timed;

use burn_megatron::mesh::stages::StageLayout;

use super::super::Recompute;
use super::super::time::ModelSeconds;
use super::entries::Entry;
use super::space::{PipelineSettings, ShardingSettings};
use super::{Plan, Rejection, Search, SearchCounts, Sizes};

/// The results of a visit.
#[derive(Default)]
pub(super) struct Found {
    pub counts: SearchCounts,
    /// The plans that fit.
    pub plans: Vec<Plan>,
    /// The plan that needs the least memory, if no plan fits yet.
    pub nearest: Option<Plan>,
}

/// The stages of one pipeline rank, each with its index.
pub(super) type RankStages<'a> = Vec<(usize, &'a StageLayout)>;

/// The visit of an entry.
pub(super) struct Visit<'s> {
    search: &'s Search<'s>,
    entry: &'s Entry<'s>,
    sizes: Sizes,
    found: Found,
    /// The seconds of the fastest plan of this visit.
    fastest: f64,
}

impl<'s> Visit<'s> {
    /// Estimates the time of all schedules and shardings of an entry. Settings that are slower than the results of the
    /// search so far are skipped.
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

    /// Estimates the time of a schedule with each sharding. Returns the shardings that do not fit into memory if the
    /// whole optimizer state is on the device. Also returns the reason why the other shardings are not tried with
    /// activation offload.
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
            // If a sharding fits without offload, offload is not faster.
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

    /// Returns the reason why a candidate is not among the best plans, if its step takes at least `seconds`.
    fn is_slower(&self, seconds: f64) -> Option<Rejection> {
        if seconds >= self.fastest {
            return Some(Rejection::SameSizes);
        }
        self.search.is_slower(self.sizes, seconds)
    }

    /// Returns whether `bytes` exceeds the limit, unless no plan fits and `bytes` is less than the nearest plan needs.
    fn is_too_large(&self, bytes: u64) -> bool {
        let none_fits = self.search.best.is_empty() && self.found.plans.is_empty();
        let own = self.found.nearest.as_ref().map(|plan| plan.memory.total());
        let nearest = own.into_iter().chain(self.search.nearest_bytes()).min();
        let is_nearer = none_fits && nearest.is_none_or(|nearest| bytes < nearest);
        bytes > self.search.config.memory_limit && !is_nearer
    }
}
