//! The schedules and shardings of one entry, against what the search has found so far.

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
    /// Where no plan fits yet, the one that needs the least memory.
    pub nearest: Option<Plan>,
}

/// A rank of the data axes with several stages.
pub(super) type RankStages<'a> = Vec<(usize, &'a StageLayout)>;

/// The visit of an entry.
pub(super) struct Visit<'s> {
    search: &'s Search<'s>,
    entry: &'s Entry<'s>,
    sizes: Sizes,
    found: Found,
    /// The seconds of the fastest plan that it found.
    fastest: f64,
}

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
}
