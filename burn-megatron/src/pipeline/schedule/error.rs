//! What can be wrong with the wish for a schedule, and what would be right.

use std::io;
use std::path::PathBuf;

use super::{Invalid, NoAction, ScheduleKind};

/// Why there is no schedule, no simulation or no picture of one.
#[derive(Debug, thiserror::Error)]
pub enum ScheduleError {
    /// No schedule has this name.
    #[error(
        "\"{name}\" is no schedule; the schedules are gpipe, 1f1b, interleaved (or interleaved:N \
         with groups of N micro-batches), zb-h1, zb-v and dualpipe-v"
    )]
    UnknownKind {
        /// The name.
        name: String,
    },
    /// Something of which at least one is needed is missing.
    #[error("a schedule needs at least 1 of its {what}, not 0")]
    Nothing {
        /// What is missing: ranks, stages or micro-batches.
        what: &'static str,
    },
    /// A stage is placed on a rank that has no list of actions.
    #[error("stage {stage} is placed on rank {rank}, but there are {ranks} ranks")]
    Placement {
        /// The stage.
        stage: usize,
        /// Its rank.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// The kind of schedule does not run that many stages on each rank.
    #[error("{kind} cannot run {asked} virtual stages on each rank: use {fits}")]
    VirtualStages {
        /// The kind of schedule.
        kind: ScheduleKind,
        /// The stages of each rank that were asked for.
        asked: usize,
        /// What would run.
        fits: &'static str,
    },
    /// The micro-batches do not make up groups with which an interleaved schedule can run.
    #[error(
        "interleaved over {ranks} stages cannot run {micro_batches} micro-batches in groups of \
         {group}: use {fits}"
    )]
    Group {
        /// Ranks of the pipeline: the stages that one micro-batch passes in a round.
        ranks: usize,
        /// Micro-batches asked for.
        micro_batches: usize,
        /// Micro-batches of a group.
        group: usize,
        /// Groups and numbers of micro-batches that would run.
        fits: String,
    },
    /// The schedule would not fit in memory.
    #[error(
        "{ranks} ranks with {virtual_stages} virtual stages and {micro_batches} micro-batches \
         make a schedule of more than {limit} computations: use fewer micro-batches"
    )]
    TooLarge {
        /// Ranks asked for.
        ranks: usize,
        /// Stages of each rank asked for.
        virtual_stages: usize,
        /// Micro-batches asked for.
        micro_batches: usize,
        /// The most computations a schedule may have.
        limit: usize,
    },
    /// A table of actions cannot be read.
    #[error("row {row}, column {column}: {fault}")]
    Csv {
        /// The row, counted from 1, as a spreadsheet does.
        row: usize,
        /// The column, counted from 1.
        column: usize,
        /// What is wrong there.
        fault: CsvFault,
    },
    /// The schedule breaks a rule.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The times do not suit the schedule.
    #[error("{what} has {given} times for {stages} stages: give one for each stage")]
    TimesCount {
        /// Which times.
        what: &'static str,
        /// How many were given.
        given: usize,
        /// Stages of the schedule.
        stages: usize,
    },
    /// A time is no time.
    #[error("{what} of stage {stage} takes {time}: use a finite time of 0 or more")]
    Time {
        /// Which times.
        what: &'static str,
        /// The stage.
        stage: usize,
        /// The time as it was given.
        time: f64,
    },
    /// The drawing failed.
    #[error("cannot draw the schedule: {0}")]
    Draw(String),
    /// The operating system refused.
    #[error("cannot write '{path}': {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason the operating system gives.
        source: io::Error,
    },
}

/// What is wrong with one cell of a table of actions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CsvFault {
    /// The cell holds no action.
    #[error(transparent)]
    NoAction(#[from] NoAction),
    /// The table holds nothing.
    #[error("the table has no actions: write one row for each rank, an action in each cell")]
    Empty,
    /// A rank has nothing to do.
    #[error("the row has no actions: every rank needs some, so delete the row or fill it")]
    EmptyRow,
    /// A stage has actions on two ranks.
    #[error(
        "\"{text}\" puts stage {stage} on rank {rank}, but row {first_row} has it already: keep \
         all actions of a stage in one row"
    )]
    StageTwice {
        /// The cell.
        text: String,
        /// The stage.
        stage: usize,
        /// The rank of this row.
        rank: usize,
        /// The row, counted from 1, that named the stage first.
        first_row: usize,
    },
    /// Numbers are left out.
    #[error("\"{text}\" names {what} {number}, but nothing names {what} {missing}: count from 0")]
    Gap {
        /// The cell.
        text: String,
        /// `stage` or `micro-batch`.
        what: &'static str,
        /// The number in the cell.
        number: usize,
        /// The lowest number that is not in the table.
        missing: usize,
    },
}
