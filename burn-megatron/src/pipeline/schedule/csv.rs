//! Reads and writes schedules as CSV, with one row per rank and one action per cell.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::validate::{Required, check_schedule};
use super::{Action, ActionKind, CsvFault, ParseActionError, Schedule, ScheduleError};

/// A cell. Rank, row (including skipped lines) and column are counted from 0.
struct Cell<'a> {
    rank: usize,
    row: usize,
    column: usize,
    text: &'a str,
    action: Action,
}

impl Cell<'_> {
    fn error(&self, fault: CsvFault) -> ScheduleError {
        csv_error(self.row, self.column, fault)
    }
}

impl Schedule {
    /// Reads a schedule from comma-separated values.
    ///
    /// Row r contains the actions of rank r. Each cell is an action such as `F 2 5`: the code of a kind, the stage and
    /// the micro-batch. Stages and micro-batches are counted from 0. The codes are:
    ///
    /// - `F`: forward, `B`: backward, `I`: input gradient, `W`: weight gradient
    /// - `SF` and `RF`: send and receive of an activation, `SB` and `RB`: send and receive of a gradient
    ///
    /// `FB 2 5 2 3` is a [pair](ActionKind::PairedForward) of the forward of micro-batch 5 through stage 2 and
    /// the backward of micro-batch 3. `RG 2` reduces the gradients of stage 2.
    ///
    /// A stage is placed on the rank whose row contains its actions. Empty cells, empty lines and lines that begin with
    /// `#` are skipped. If the table has no sends and receives, [they are added](Self::with_communication). Otherwise
    /// the table must contain all sends and receives. If the table has no `RG`, [an `RG` is added after the last
    /// forward of each stage](Self::with_reduce_gradients). Otherwise the table must contain an `RG` for each stage.
    ///
    /// ```text
    /// F 0 0,F 0 1,B 0 0,B 0 1
    /// F 1 0,B 1 0,F 1 1,B 1 1
    /// ```
    ///
    /// ```
    /// use burn_megatron::pipeline::schedule::{Schedule, validate};
    ///
    /// let schedule = Schedule::from_csv("mine", "F 0 0,F 0 1,B 0 0,B 0 1\nF 1 0,B 1 0,F 1 1,B 1 1")?;
    /// validate(&schedule)?;
    /// assert_eq!((schedule.ranks(), schedule.micro_batches()), (2, 2));
    /// // Rank 1 waits for a forward that rank 0 never runs.
    /// assert!(Schedule::from_csv("wrong", "F 0 0,B 0 0\nF 1 0,B 1 0,F 1 1,B 1 1").is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ScheduleError::Csv`] with the row, the column and the text of an invalid cell. If sends, receives or `RG` have
    /// to be added, the schedule is also validated, and [`ScheduleError::Invalid`] is returned for an invalid schedule.
    /// A table that contains all of them is not validated: call [`validate`](super::validate).
    pub fn from_csv(name: impl Into<String>, text: &str) -> Result<Self, ScheduleError> {
        let cells = cells(text)?;
        let placement = placement(&cells)?;
        let with_micro_batch = cells
            .iter()
            .filter(|cell| cell.action.kind != ActionKind::ReduceGradients)
            .map(|cell| (cell, cell.action.micro_batch));
        let micro_batches = count("micro-batch", with_micro_batch)?;
        let mut ranks = vec![vec![]; cells.last().map_or(0, |cell| cell.rank + 1)];
        for cell in &cells {
            ranks[cell.rank].push(cell.action);
        }
        let mut schedule = Schedule::new(name, placement, micro_batches, ranks)?;
        let has_transfers = cells.iter().any(|cell| cell.action.kind.is_transfer());
        if !has_transfers {
            schedule = schedule.with_communication()?;
        } else if !schedule.has_reductions() {
            let required = Required {
                transfers: true,
                reductions: false,
            };
            check_schedule(&schedule, required)?;
        }
        if !schedule.has_reductions() {
            schedule = schedule.with_reduce_gradients();
        }
        Ok(schedule)
    }

    /// Writes all actions of the schedule in the format that [`Schedule::from_csv`] reads.
    pub fn to_csv(&self) -> String {
        let mut text = String::new();
        for list in &self.ranks {
            let mut before = None;
            for action in list {
                match before {
                    None => write!(text, "{action}"),
                    // The backward of a pair is in the cell of its forward.
                    Some(ActionKind::PairedForward) => {
                        write!(text, " {} {}", action.stage, action.micro_batch)
                    }
                    Some(_) => write!(text, ",{action}"),
                }
                .expect("writing to a string does not fail");
                before = Some(action.kind);
            }
            text.push('\n');
        }
        text
    }
}

/// Returns all non-empty cells.
fn cells(text: &str) -> Result<Vec<Cell<'_>>, ScheduleError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut cells = vec![];
    let rows = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty() && !line.trim_start().starts_with('#'));
    for (rank, (row, line)) in rows.enumerate() {
        let before = cells.len();
        for (column, text) in line.split(',').map(str::trim).enumerate() {
            if text.is_empty() {
                continue;
            }
            let actions = actions(text);
            let actions =
                actions.map_err(|fault| csv_error(row, column, CsvFault::InvalidAction(fault)))?;
            cells.extend(actions.into_iter().map(|action| Cell {
                rank,
                row,
                column,
                text,
                action,
            }));
        }
        if cells.len() == before {
            return Err(csv_error(row, 0, CsvFault::EmptyRow));
        }
    }
    if cells.is_empty() {
        return Err(csv_error(0, 0, CsvFault::Empty));
    }
    Ok(cells)
}

/// Returns the action of a cell, or the two actions of a pair.
fn actions(text: &str) -> Result<Vec<Action>, ParseActionError> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let code = ActionKind::PairedForward.code();
    let pair = match words[..] {
        [first, stage, micro_batch, of_backward, backward] if first == code => [
            format!("{code} {stage} {micro_batch}"),
            format!("{} {of_backward} {backward}", ActionKind::Backward.code()),
        ],
        [first, ..] if first == code => return Err(ParseActionError { text: text.into() }),
        _ => return Ok(vec![text.parse()?]),
    };
    let parse = |text: String| text.parse::<Action>();
    let pair: Result<Vec<_>, _> = pair.into_iter().map(parse).collect();
    pair.map_err(|_| ParseActionError { text: text.into() })
}

/// Returns the rank of each stage, which is the rank of its row.
fn placement(cells: &[Cell<'_>]) -> Result<Vec<usize>, ScheduleError> {
    let mut ranks = BTreeMap::new();
    for cell in cells {
        let stage = cell.action.stage;
        let (rank, first_row) = *ranks.entry(stage).or_insert((cell.rank, cell.row + 1));
        if rank != cell.rank {
            return Err(cell.error(CsvFault::StageTwice {
                text: cell.text.into(),
                stage,
                rank: cell.rank,
                first_row,
            }));
        }
    }
    count("stage", cells.iter().map(|cell| (cell, cell.action.stage)))?;
    Ok(ranks.into_values().map(|(rank, _)| rank).collect())
}

/// Returns the number of stages or micro-batches, or an error if the numbers in the cells have a gap.
fn count<'a>(
    what: &'static str,
    mut numbered: impl Iterator<Item = (&'a Cell<'a>, usize)> + Clone,
) -> Result<usize, ScheduleError> {
    let mut numbers: Vec<_> = numbered.clone().map(|(_, number)| number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let gap = numbers.iter().enumerate().find(|(i, number)| i != *number);
    let Some((missing, _)) = gap else {
        return Ok(numbers.len());
    };
    let (first, number) = numbered
        .find(|(_, number)| *number > missing)
        .expect("some cell has a number after the gap");
    Err(first.error(CsvFault::Gap {
        text: first.text.into(),
        what,
        number,
        missing,
    }))
}

/// Returns an error at a row and a column counted from 0.
fn csv_error(row: usize, column: usize, fault: CsvFault) -> ScheduleError {
    ScheduleError::Csv {
        row: row + 1,
        column: column + 1,
        fault,
    }
}
