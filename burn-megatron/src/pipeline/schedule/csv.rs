//! Schedules as tables: a row for each rank, an action in each cell.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{Action, CsvFault, Schedule, ScheduleError};

/// A cell: its rank, its row (which counts lines without a rank too) and its column, all counted
/// from 0, its text, and its action.
struct Cell<'a> {
    rank: usize,
    row: usize,
    column: usize,
    text: &'a str,
    action: Action,
}

impl Cell<'_> {
    fn error(&self, fault: CsvFault) -> ScheduleError {
        at(self.row, self.column, fault)
    }
}

impl Schedule {
    /// Reads a schedule from comma-separated values.
    ///
    /// Row r is rank r, and each of its cells an action as in `F 2 5`: `F` forward, `B` backward,
    /// `I` input gradient, `W` weight gradient, `SF` and `RF` send and receive an activation, `SB`
    /// and `RB` a gradient; then the stage and the micro-batch, counted from 0. A stage lies on the
    /// rank whose row names it. Empty cells are skipped, so that a table may show idle time, and so
    /// are empty lines and lines that begin with `#`. A table without any send or receive gets
    /// [those it needs](Self::with_communication); otherwise it has to have them all.
    ///
    /// ```text
    /// F 0 0,F 0 1,B 0 0,B 0 1
    /// F 1 0,B 1 0,F 1 1,B 1 1
    /// ```
    ///
    /// # Errors
    ///
    /// [`ScheduleError::Csv`] names the row, the column and the text; [`ScheduleError::Invalid`]
    /// where the table has no sends and breaks another rule. A table with sends may break rules
    /// that [`validate`](super::validate) finds.
    pub fn from_csv(name: impl Into<String>, text: &str) -> Result<Self, ScheduleError> {
        let cells = cells(text)?;
        let placement = placement(&cells)?;
        let micro_batches = counted(&cells, "micro-batch", |action| action.micro_batch)?;
        let mut ranks = vec![vec![]; cells.last().map_or(0, |cell| cell.rank + 1)];
        for cell in &cells {
            ranks[cell.rank].push(cell.action);
        }
        let schedule = Schedule::new(name, placement, micro_batches, ranks)?;
        if cells.iter().all(|cell| cell.action.kind.is_compute()) {
            return Ok(schedule.with_communication()?);
        }
        Ok(schedule)
    }

    /// Writes what [`Schedule::from_csv`] reads, sends and receives included.
    pub fn to_csv(&self) -> String {
        let mut text = String::new();
        for list in &self.ranks {
            for (i, action) in list.iter().enumerate() {
                let comma = if i == 0 { "" } else { "," };
                write!(text, "{comma}{action}").expect("a string takes everything");
            }
            text.push('\n');
        }
        text
    }
}

/// Every cell that is not empty.
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
            let action = text
                .parse()
                .map_err(|fault| at(row, column, CsvFault::NoAction(fault)))?;
            cells.push(Cell {
                rank,
                row,
                column,
                text,
                action,
            });
        }
        if cells.len() == before {
            return Err(at(row, 0, CsvFault::EmptyRow));
        }
    }
    if cells.is_empty() {
        return Err(at(0, 0, CsvFault::Empty));
    }
    Ok(cells)
}

/// The rank of each stage: the row that names it.
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
    counted(cells, "stage", |action| action.stage)?;
    Ok(ranks.into_values().map(|(rank, _)| rank).collect())
}

/// How many stages or micro-batches there are, if all numbers from 0 are named.
fn counted(
    cells: &[Cell<'_>],
    what: &'static str,
    number: impl Fn(&Action) -> usize,
) -> Result<usize, ScheduleError> {
    let mut numbers: Vec<_> = cells.iter().map(|cell| number(&cell.action)).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let gap = numbers.iter().enumerate().find(|(i, number)| i != *number);
    let Some((missing, _)) = gap else {
        return Ok(numbers.len());
    };
    let first = cells
        .iter()
        .find(|cell| number(&cell.action) > missing)
        .expect("a number after the gap stands in some cell");
    Err(first.error(CsvFault::Gap {
        text: first.text.into(),
        what,
        number: number(&first.action),
        missing,
    }))
}

/// An error at a place counted from 0.
fn at(row: usize, column: usize, fault: CsvFault) -> ScheduleError {
    ScheduleError::Csv {
        row: row + 1,
        column: column + 1,
        fault,
    }
}
