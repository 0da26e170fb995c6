//! Creates the schedule and the pipeline stages of a parallel layout.

use super::schedule::{
    InvalidSchedule, Schedule, ScheduleConfig, ScheduleError, generate, validate,
};
use super::split::{SplitError, StageLayout};
use crate::mesh::{ParallelConfig, ScheduleKind, ScheduleSource};
use crate::regular_file;

/// The error that is returned if the schedule or the stages of a layout cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum LayoutScheduleError {
    /// The sizes of the layout are invalid for the schedule, or the file does not contain a schedule.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The schedule in the file is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidSchedule),
    /// The layers cannot be distributed over the stages.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// The file cannot be read.
    #[error("cannot read the schedule {path}: {error}")]
    Read {
        /// The path of the file.
        path: String,
        /// The cause.
        error: std::io::Error,
    },
    /// The schedule in the file is for another number of ranks or micro-batches.
    #[error(
        "the schedule {path} is for {} ranks and {} micro-batches, but the run has {} and {}",
        found.0, found.1, expected.0, expected.1
    )]
    Sizes {
        /// The path of the file.
        path: String,
        /// The numbers of ranks and micro-batches in the file.
        found: (usize, usize),
        /// The numbers of ranks and micro-batches of the run.
        expected: (usize, usize),
    },
    /// Overlap of expert communication was requested, but the schedule in the file has no pairs of a forward and a
    /// backward.
    #[error(
        "overlap_moe_expert_parallel_comm requires pairs of a forward and a backward (FB), and the schedule {path} has \
         none: add pairs, or remove overlap_moe_expert_parallel_comm"
    )]
    NoPairs {
        /// The path of the file.
        path: String,
    },
    /// The number of stages of the schedule in the file conflicts with `virtual_stages`.
    #[error("the schedule {path} has {stages} stages; remove virtual_stages")]
    Stages {
        /// The path of the file.
        path: String,
        /// The number of stages in the file.
        stages: usize,
    },
}

/// Returns the schedule of a layout. The schedule is generated, or read from the CSV file of the layout and validated.
/// `micro_batches` is the number of micro-batches per step on each data-parallel rank.
///
/// # Errors
///
/// [`LayoutScheduleError`] if the sizes are invalid for the schedule, or the file cannot be read or has an
/// invalid schedule.
pub fn schedule_of(
    layout: &ParallelConfig,
    micro_batches: usize,
) -> Result<Schedule, LayoutScheduleError> {
    let path = match layout.schedule.clone().unwrap_or_default() {
        ScheduleSource::Kind(kind) => {
            let config = ScheduleConfig::new(kind, layout.pipeline, micro_batches)
                .with_virtual_stages(stages_per_rank(layout, kind))
                .with_pairs(layout.overlap_moe_expert_parallel_comm);
            return Ok(generate(&config)?);
        }
        ScheduleSource::File(path) => path,
    };
    let schedule = read(&path)?;
    let found = (schedule.ranks(), schedule.micro_batches());
    let expected = (layout.pipeline, micro_batches);
    if found != expected {
        return Err(LayoutScheduleError::Sizes {
            path,
            found,
            expected,
        });
    }
    let stages = schedule.stages();
    if layout.overlap_moe_expert_parallel_comm && !schedule.has_pairs() {
        return Err(LayoutScheduleError::NoPairs { path });
    }
    if layout
        .virtual_stages
        .is_some_and(|own| own.saturating_mul(layout.pipeline) != stages)
    {
        return Err(LayoutScheduleError::Stages { path, stages });
    }
    Ok(schedule)
}

/// Returns the layers and modules of every pipeline stage of a layout, for a model with `layers` layers. Without a
/// pipeline there is one stage.
///
/// # Errors
///
/// [`LayoutScheduleError`] if the layers cannot be distributed over the stages.
pub fn stages_of(
    layout: &ParallelConfig,
    layers: usize,
) -> Result<Vec<StageLayout>, LayoutScheduleError> {
    let stages = match layout.schedule.clone().unwrap_or_default() {
        ScheduleSource::Kind(kind) => stages_per_rank(layout, kind).saturating_mul(layout.pipeline),
        ScheduleSource::File(path) => read(&path)?.stages(),
    };
    Ok(layout.split.stages(layers, stages)?)
}

/// Returns the stages of one pipeline rank. Each stage is returned with its number and its layers and modules.
///
/// ```
/// use burn_megatron::mesh::ParallelConfig;
/// use burn_megatron::pipeline::{schedule_of, stages_on_rank};
///
/// let layout = ParallelConfig::new().with_pipeline(2);
/// assert_eq!(schedule_of(&layout, 4)?.name(), "1f1b");
/// let stages = stages_on_rank(&layout, 1, 8)?;
/// let (index, stage) = &stages[0];
/// assert_eq!((*index, stage.layers.clone(), stage.loss), (1, 4..8, true));
/// # Ok::<(), burn_megatron::pipeline::LayoutScheduleError>(())
/// ```
///
/// # Errors
///
/// The errors of [`stages_of`].
pub fn stages_on_rank(
    layout: &ParallelConfig,
    rank: usize,
    layers: usize,
) -> Result<Vec<(usize, StageLayout)>, LayoutScheduleError> {
    let stages = stages_of(layout, layers)?.into_iter().enumerate();
    let own = match layout.schedule.clone().unwrap_or_default() {
        ScheduleSource::Kind(kind) => stages
            .filter(|(stage, _)| kind.rank_of(*stage, layout.pipeline) == rank)
            .collect(),
        ScheduleSource::File(path) => {
            let schedule = read(&path)?;
            let is_own = |(stage, _): &(usize, StageLayout)| schedule.rank_of(*stage) == rank;
            stages.filter(is_own).collect()
        }
    };
    Ok(own)
}

/// The maximum size of a schedule that is read, in bytes.
const MAX_SCHEDULE_BYTES: u64 = 256 << 20;

fn stages_per_rank(layout: &ParallelConfig, kind: ScheduleKind) -> usize {
    layout
        .virtual_stages
        .unwrap_or(kind.default_virtual_stages())
}

fn read(path: &str) -> Result<Schedule, LayoutScheduleError> {
    let text = regular_file::read_text(path.as_ref(), MAX_SCHEDULE_BYTES).map_err(|error| {
        LayoutScheduleError::Read {
            path: path.into(),
            error,
        }
    })?;
    let schedule = Schedule::from_csv(path, &text)?;
    validate(&schedule)?;
    Ok(schedule)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the placement of the schedule with the placement of the stages that are built before the
    /// schedule exists.
    #[test]
    fn stages_are_built_where_the_schedule_has_them() {
        for kind in ScheduleKind::ALL {
            let layout = ParallelConfig::new().with_pipeline(4).with_schedule(kind);
            let schedule = schedule_of(&layout, 8).unwrap();
            for rank in 0..4 {
                let stages = stages_on_rank(&layout, rank, 16).unwrap();
                let mut indices: Vec<_> = stages.iter().map(|(stage, _)| *stage).collect();
                let mut expected = schedule.stages_of(rank);
                indices.sort_unstable();
                expected.sort_unstable();
                assert_eq!(indices, expected, "{kind}, rank {rank}");
            }
        }
    }

    #[test]
    fn without_a_pipeline_there_is_one_stage() {
        let whole = StageLayout {
            embedding: true,
            layers: 0..3,
            loss: true,
        };
        assert_eq!(
            stages_on_rank(&ParallelConfig::new(), 0, 3).unwrap(),
            [(0, whole)]
        );
    }

    #[test]
    fn a_file_is_checked_against_the_layout() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.csv");
        let layout = ParallelConfig::new().with_pipeline(2);
        let schedule = schedule_of(&layout, 4).unwrap();
        std::fs::write(&path, schedule.to_csv()).unwrap();
        let path = path.display().to_string();
        let layout = layout.with_schedule(ScheduleSource::File(path.clone()));
        assert_eq!(schedule_of(&layout, 4).unwrap().stages(), 2);
        assert_eq!(stages_on_rank(&layout, 1, 4).unwrap()[0].1.layers, 2..4);
        let refused = |layout: &ParallelConfig, micro_batches| {
            let error = schedule_of(layout, micro_batches).unwrap_err();
            error.to_string()
        };
        assert_eq!(
            refused(&layout, 8),
            format!(
                "the schedule {path} is for 2 ranks and 4 micro-batches, but the run has 2 and 8"
            )
        );
        assert_eq!(
            refused(&layout.clone().with_virtual_stages(2), 4),
            format!("the schedule {path} has 2 stages; remove virtual_stages")
        );
        let missing = layout.with_schedule(ScheduleSource::File("none.csv".into()));
        assert!(refused(&missing, 4).starts_with("cannot read the schedule none.csv: "));
    }
}
