//! Errors of schedules, simulations and drawings.

use super::{InvalidSchedule, ParseActionError, ScheduleKind};

/// An error of a schedule, a simulation or a drawing.
#[derive(Debug, thiserror::Error)]
pub enum ScheduleError {
    /// The number of ranks, stages or micro-batches is 0.
    #[error("invalid number of {what} 0: a schedule needs at least 1")]
    Zero {
        /// The name of the size: ranks, stages or micro-batches.
        what: &'static str,
    },
    /// A stage is placed on a rank that has no list of actions.
    #[error("stage {stage} is placed on rank {rank}: expected a rank below {ranks}")]
    Placement {
        /// The stage.
        stage: usize,
        /// The rank of the stage.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// The kind of schedule does not support this number of stages per rank.
    #[error("{kind} does not support {asked} virtual stages per rank: use {fits}")]
    VirtualStages {
        /// The kind of schedule.
        kind: ScheduleKind,
        /// The requested number of stages per rank.
        asked: usize,
        /// The valid values, as text for the message.
        fits: &'static str,
    },
    /// The size of the groups of micro-batches is invalid for an interleaved schedule.
    #[error(
        "interleaved over {ranks} stages cannot run {micro_batches} micro-batches in groups of \
         {group}: use {fits}"
    )]
    Group {
        /// The number of pipeline ranks.
        ranks: usize,
        /// The requested number of micro-batches.
        micro_batches: usize,
        /// The number of micro-batches in a group.
        group: usize,
        /// The valid group sizes and numbers of micro-batches.
        fits: String,
    },
    /// Pairs were requested, but the kind of schedule has no forward that is directly followed by a complete backward.
    #[error("{kind} has no pairs of a forward and a backward: use 1f1b, interleaved or dualpipe-v")]
    Unpaired {
        /// The kind of schedule.
        kind: ScheduleKind,
    },
    /// Pairs were requested, but there are too few micro-batches to form a pair.
    #[error(
        "{kind} on {ranks} pipeline ranks has no pairs of a forward and a backward in steps of {micro_batches} \
         micro-batches: use at least {fits} micro-batches for each data rank"
    )]
    NoPair {
        /// The kind of schedule.
        kind: ScheduleKind,
        /// The number of pipeline ranks.
        ranks: usize,
        /// The requested number of micro-batches.
        micro_batches: usize,
        /// The minimum number of micro-batches with which the schedule has a pair.
        fits: usize,
    },
    /// The schedule has too many computations.
    #[error(
        "{ranks} ranks with {virtual_stages} virtual stages and {micro_batches} micro-batches \
         make a schedule of more than {limit} computations: use fewer micro-batches"
    )]
    TooLarge {
        /// The requested number of ranks.
        ranks: usize,
        /// The requested number of stages per rank.
        virtual_stages: usize,
        /// The requested number of micro-batches.
        micro_batches: usize,
        /// The maximum number of computations of a schedule.
        limit: usize,
    },
    /// A cell of a CSV schedule is invalid.
    #[error("row {row}, column {column}: {fault}")]
    Csv {
        /// The row, counted from 1.
        row: usize,
        /// The column, counted from 1.
        column: usize,
        /// The error in the cell.
        fault: CsvFault,
    },
    /// The schedule violates a rule of valid schedules.
    #[error(transparent)]
    Invalid(#[from] InvalidSchedule),
    /// A list of times does not have one time per stage.
    #[error("{what} has {given} times for {stages} stages: expected one per stage")]
    TimesCount {
        /// The name of the list of times, such as the times of forwards.
        what: &'static str,
        /// The number of times in the list.
        given: usize,
        /// The number of stages of the schedule.
        stages: usize,
    },
    /// A time is negative or not finite.
    #[error(
        "invalid time {time} of {what} of stage {stage}: expected a finite number of 0 or more"
    )]
    Time {
        /// The name of the list of times, such as the times of forwards.
        what: &'static str,
        /// The stage.
        stage: usize,
        /// The time.
        time: f64,
    },
}

/// An error in a CSV schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CsvFault {
    /// The cell is not an action.
    #[error(transparent)]
    InvalidAction(#[from] ParseActionError),
    /// The table is empty.
    #[error("the table has no actions: expected one row per rank, with an action in each cell")]
    Empty,
    /// A row is empty.
    #[error(
        "the row has no actions: expected at least one action per rank; add an action or delete the row"
    )]
    EmptyRow,
    /// A stage has actions on two ranks.
    #[error(
        "\"{text}\" has stage {stage} on rank {rank}, but row {first_row} has it too: expected all \
         actions of a stage in one row"
    )]
    StageTwice {
        /// The text of the cell.
        text: String,
        /// The stage.
        stage: usize,
        /// The rank of the row that contains the cell.
        rank: usize,
        /// The first row that contains the stage, counted from 1.
        first_row: usize,
    },
    /// The numbers of the stages or the micro-batches have a gap.
    #[error("\"{text}\" has {what} {number}, but no cell has {what} {missing}: number them from 0")]
    Gap {
        /// The text of the cell.
        text: String,
        /// `stage` or `micro-batch`.
        what: &'static str,
        /// The number in the cell.
        number: usize,
        /// The lowest number that is missing in the CSV table.
        missing: usize,
    },
}
