//! The pipeline schedules of a search. Each schedule is generated once. If there are many micro-batches, only the start
//! of the schedule is generated.

use std::sync::Arc;

use burn_megatron::mesh::ParallelConfig;
use burn_megatron::mesh::stages::StageLayout;
use burn_megatron::pipeline::schedule::{Schedule, StageTimes, total_time};
use burn_megatron::pipeline::{LayoutScheduleError, schedule_of, stages_of};

use super::super::fit::in_flight;
use super::cache::Cache;
use super::space::PipelineSettings;

/// The number of micro-batches per rank after which a schedule becomes periodic.
const WARM_UP: usize = 4;

/// The schedule of a pipeline. For many micro-batches, it is represented by two shorter schedules. The second schedule
/// is one period longer than the first schedule. A period has `ranks` micro-batches. Each further period takes the same
/// time.
#[derive(Clone, Debug)]
pub struct Pipeline {
    schedule: Arc<Schedule>,
    /// The schedule with one more period. `None` if `schedule` contains all requested micro-batches.
    next: Option<Arc<Schedule>>,
    /// The number of further periods that are not in the schedules.
    periods: f64,
}

/// A value, or the reason why it cannot be created.
type Made<V> = Result<Arc<V>, String>;

/// A cache of the schedules and stages that layouts with the same pipeline share.
#[derive(Debug, Default)]
pub struct Pipelines {
    /// Schedules, keyed by kind and stages per rank, ranks, micro-batches, and whether forwards run together with
    /// backwards of other micro-batches.
    schedules: Cache<(PipelineSettings, usize, usize, bool), Made<Schedule>>,
    /// Stages, keyed by kind and stages per rank, and ranks.
    stages: Cache<(PipelineSettings, usize), Made<Vec<StageLayout>>>,
}

impl Pipelines {
    /// Returns the pipeline stages of a layout with these settings.
    ///
    /// # Errors
    ///
    /// A message that explains why the layers cannot be distributed over the stages.
    pub fn stages(
        &self,
        settings: PipelineSettings,
        layout: &ParallelConfig,
        layers: usize,
    ) -> Result<Arc<Vec<StageLayout>>, String> {
        self.stages.get((settings, layout.pipeline), || {
            let text = |error: LayoutScheduleError| error.to_string();
            stages_of(layout, layers).map(Arc::new).map_err(text)
        })
    }

    /// Returns the pipeline schedule of a layout for `micro_batches` micro-batches.
    ///
    /// # Errors
    ///
    /// A message that explains why the schedule generator rejects the settings.
    pub fn get(
        &self,
        settings: PipelineSettings,
        layout: &ParallelConfig,
        micro_batches: usize,
    ) -> Result<Pipeline, String> {
        let ranks = layout.pipeline;
        let few = WARM_UP * ranks + micro_batches % ranks;
        let schedule = |micro_batches| {
            let pairs = layout.overlap_moe_expert_parallel_comm;
            let key = (settings, ranks, micro_batches, pairs);
            self.schedules.get(key, || {
                let schedule = schedule_of(layout, micro_batches);
                let text = |error: LayoutScheduleError| error.to_string();
                schedule.map(Arc::new).map_err(text)
            })
        };
        if micro_batches <= few + ranks {
            return Ok(Pipeline {
                schedule: schedule(micro_batches)?,
                next: None,
                periods: 0.0,
            });
        }
        Ok(Pipeline {
            schedule: schedule(few)?,
            next: Some(schedule(few + ranks)?),
            periods: ((micro_batches - few) / ranks) as f64,
        })
    }
}

impl Pipeline {
    /// Returns the simulated time of all micro-batches, in seconds.
    pub fn seconds(&self, times: &StageTimes) -> Result<f64, String> {
        let total = |schedule| total_time(schedule, times).map_err(|error| error.to_string());
        let seconds = total(&self.schedule)?;
        Ok(match &self.next {
            None => seconds,
            Some(next) => seconds + self.periods * (total(next)? - seconds),
        })
    }

    /// Returns the peak number of activation bytes of a pipeline rank over the schedule. A micro-batch keeps `bytes[s]`
    /// bytes in stage `s` for its backward.
    pub fn in_flight(&self, rank: usize, bytes: &[u64]) -> u64 {
        let kept = in_flight(Some(&self.schedule), rank, bytes);
        match &self.next {
            None => kept,
            Some(next) => {
                let more = in_flight(Some(next), rank, bytes) - kept;
                kept + self.periods as u64 * more
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::mesh::ScheduleKind;
    use burn_megatron::pipeline::schedule::simulate;

    /// Checks that the start of a schedule determines the time and the memory of the whole schedule, for every kind of
    /// schedule and for stages of different sizes.
    #[test]
    fn a_schedule_repeats_itself() {
        let pipelines = Pipelines::default();
        for kind in ScheduleKind::ALL {
            for (ranks, micro_batches) in [(2, 40), (4, 64), (3, 39)] {
                let stages = kind.default_virtual_stages();
                let layout = ParallelConfig::new()
                    .with_pipeline(ranks)
                    .with_schedule(kind)
                    .with_virtual_stages(stages);
                let vary = |scale: f64| {
                    let stages = (0..ranks * stages).map(|s| scale * (1.0 + 0.1 * (s % 3) as f64));
                    stages.collect::<Vec<_>>()
                };
                let times = StageTimes {
                    forward: vary(1.0),
                    paired_forward: vary(1.0),
                    input_gradient: vary(1.2),
                    weight_gradient: vary(0.9),
                    transfer: vec![0.05; ranks * stages],
                };
                let pipeline = pipelines.get(Some((kind, stages)), &layout, micro_batches);
                let pipeline = pipeline.unwrap();
                assert!(pipeline.next.is_some());
                let found = pipeline.seconds(&times).unwrap();
                // One micro-batch passes all stages, with a transfer between ranks.
                let rank_of = |stage| kind.rank_of(stage, ranks);
                let hops = (1..ranks * stages).filter(|s| rank_of(*s) != rank_of(s - 1));
                let computed = times.forward.iter().chain(&times.input_gradient);
                let path = computed.sum::<f64>() + 2.0 * hops.count() as f64 * 0.05;
                let few = schedule_of(&layout, 2 * ranks).unwrap();
                assert!(
                    path <= simulate(&few, &times).unwrap().total(),
                    "{kind}, {ranks}"
                );
                let schedule = schedule_of(&layout, micro_batches).unwrap();
                let whole = simulate(&schedule, &times).unwrap().total();
                assert!(
                    (found / whole - 1.0).abs() < 2e-3,
                    "{kind}, {ranks}: {found}, {whole}"
                );
                let bytes: Vec<u64> = (0..ranks * stages).map(|s| 10 + s as u64).collect();
                for rank in 0..ranks {
                    let whole = in_flight(Some(&schedule), rank, &bytes);
                    assert_eq!(
                        pipeline.in_flight(rank, &bytes),
                        whole,
                        "{kind}, rank {rank}"
                    );
                }
            }
        }
    }

    /// Checks the bubbles of published layouts: 1.0819 % of the step for Llama 3 70B, 0.4537 % for Llama 3 405B, and
    /// 0.3891 % for DeepSeek-V3.
    #[test]
    fn bubbles_are_the_known_ones() {
        let pipelines = Pipelines::default();
        let kind = ScheduleKind::Interleaved { group: None };
        for (ranks, stages, micro_batches, expected) in
            [(8, 5, 128, 1.0819), (8, 8, 192, 0.4537), (2, 8, 32, 0.3891)]
        {
            let layout = ParallelConfig::new()
                .with_pipeline(ranks)
                .with_schedule(kind)
                .with_virtual_stages(stages);
            let times = StageTimes::uniform(ranks * stages, 1.0, 1.0, 1.0, 0.0);
            let settings = Some((kind, stages));
            let pipeline = pipelines.get(settings, &layout, micro_batches).unwrap();
            let total = pipeline.seconds(&times).unwrap();
            let bubble = 1.0 - (3 * stages * micro_batches) as f64 / total;
            assert_eq!((bubble * 1e6).round() / 1e4, expected);
        }
    }
}
