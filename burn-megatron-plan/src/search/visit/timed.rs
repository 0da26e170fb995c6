//! Estimates the times of the schedules of an entry, and computes the memory of its ranks.

use std::sync::Arc;

use super::super::super::Recompute;
use super::super::super::fit;
use super::super::super::memory::MemoryByKind;
use super::super::super::time::{ModelSeconds, PipelineSeconds};
use super::super::Rejection;
use super::super::pipelines::Pipeline;
use super::super::rank_class::RankClass;
use super::super::space::{self, PipelineSettings, ShardingSettings};
use super::sharded::{Needed, data_sizes};
use super::{RankStages, Visit};
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::mesh::stages::StageLayout;

/// An entry with its schedule.
pub(super) struct Timed {
    pub(super) settings: PipelineSettings,
    pub(super) recompute: Recompute,
    /// The memory of the training state, indexed by sharding and class of ranks.
    pub(super) states: Vec<Vec<MemoryByKind>>,
    pub(super) layout: ParallelConfig,
    pub(super) stages: Arc<Vec<StageLayout>>,
    pub(super) seconds: PipelineSeconds,
    pub(super) classes: Vec<RankClass>,
    pub(super) pipeline: Option<Pipeline>,
}

impl Visit<'_> {
    /// Times an entry with a schedule: computes its stages, their times, and their memory.
    pub(super) fn time(
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
        // Ranks that share cores may take less time than the simulated path.
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

    /// Computes the activations and temporary tensors of the ranks, in addition to their state.
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
            // If a forward runs together with a backward, two micro-batches are in flight.
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

    /// Returns the memory of the training state for each sharding and each class of ranks.
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
}

/// Returns the stages of each pipeline rank, each with its index.
pub(super) fn ranked(
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

/// Returns the layout with a schedule and a layer split.
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
