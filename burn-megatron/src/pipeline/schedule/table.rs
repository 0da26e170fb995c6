//! The text form of a simulation.

use super::{ActionKind, ActionSpan, Simulation};

/// The minimum width of a block of the table.
const MIN_COLUMNS: usize = 20;
/// The maximum width of an action, in widths of its label. One short action must not stretch all other actions.
const MAX_STRETCH: f64 = 12.0;
const IDLE: char = '·';

impl Simulation {
    /// Draws the simulation as text with at most `columns` characters per line. Each rank is a row, and time runs from
    /// left to right. Long rows are wrapped into blocks. Below the rows are a legend, the total time, the bubble, and
    /// the peak number of stage activations in memory on each rank. The last two lines may be longer than `columns`.
    ///
    /// Each computation is labeled with the letter of its kind and the number of its micro-batch. If a rank has two
    /// stages, the letters of the second stage are lower case. If a rank has more than two stages, the label ends with
    /// a dot and the index of the stage on the rank.
    pub fn table(&self, columns: usize) -> String {
        let gutter = format!("r{} ", self.schedule().ranks() - 1).len();
        let width = columns.saturating_sub(gutter).max(MIN_COLUMNS);
        let scale = self.columns_per_time(width);
        let rows: Vec<Vec<char>> = (0..self.schedule().ranks())
            .map(|rank| self.row(rank, scale))
            .collect();
        let length = rows.iter().map(Vec::len).max().unwrap_or(0);
        let mut text = String::new();
        for first in (0..length).step_by(width) {
            let time = number(first as f64 / scale);
            text += &format!("{:gutter$}time {time}\n", "");
            for (rank, row) in rows.iter().enumerate() {
                let last = (first + width).min(row.len());
                let cells: String = row[first.min(last)..last].iter().collect();
                let name = format!("r{rank}");
                text += format!("{name:gutter$}{cells}").trim_end();
                text.push('\n');
            }
        }
        text + &self.legend() + &self.summary() + "\n"
    }

    /// Returns one line with the total time, the bubble and the peak number of stage activations in memory.
    pub fn summary(&self) -> String {
        let schedule = self.schedule();
        let peaks: Vec<_> = self
            .peak_activations()
            .iter()
            .map(usize::to_string)
            .collect();
        format!(
            "{}: {}, {}, {}; total {}, bubble {:.1} %, \
             live stage-activations per rank at most {}",
            schedule.name(),
            counted(schedule.ranks(), "rank", "s"),
            counted(schedule.stages(), "stage", "s"),
            counted(schedule.micro_batches(), "micro-batch", "es"),
            number(self.total()),
            100.0 * self.bubble(),
            peaks.join(" ")
        )
    }

    /// Returns the computations of a rank with a duration above 0.
    fn computations(&self, rank: usize) -> impl Iterator<Item = &ActionSpan> {
        self.timeline(rank)
            .iter()
            .filter(|span| span.action.kind.is_compute() && span.end > span.start)
    }

    /// Returns the scale at which the shortest computation fits its label, or a larger scale if everything
    /// still fits into `width`.
    fn columns_per_time(&self, width: usize) -> f64 {
        let (mut shortest, mut longest, mut label) = (f64::INFINITY, 0.0_f64, 1);
        for rank in 0..self.schedule().ranks() {
            for span in self.computations(rank) {
                shortest = shortest.min(span.end - span.start);
                longest = longest.max(span.end - span.start);
                label = label.max(self.label(rank, span).len());
            }
        }
        if longest == 0.0 {
            return 1.0;
        }
        let available = (width as f64 * shortest / self.total()).floor();
        let most = MAX_STRETCH * label as f64 / longest;
        (available.clamp(label as f64, label as f64 + 2.0) / shortest).min(most)
    }

    fn row(&self, rank: usize, scale: f64) -> Vec<char> {
        let column = |time: f64| (time * scale).round() as usize;
        let mut row = vec![IDLE; column(self.total())];
        for span in self.computations(rank) {
            let cells = &mut row[column(span.start)..column(span.end)];
            let text = self.label(rank, span);
            let text = text.chars().chain(std::iter::repeat(' '));
            for (cell, character) in cells.iter_mut().zip(text) {
                *cell = character;
            }
        }
        row
    }

    fn label(&self, rank: usize, span: &ActionSpan) -> String {
        let letter = span.action.kind.code();
        let micro_batch = span.action.micro_batch;
        match self.chunk(rank, span) {
            (0, 1 | 2) => format!("{letter}{micro_batch}"),
            (_, 2) => format!("{}{micro_batch}", letter.to_lowercase()),
            (chunk, _) => format!("{letter}{micro_batch}.{chunk}"),
        }
    }

    /// Returns the index of a computation's stage among the stages of its rank, and the number of stages of the rank.
    pub fn chunk(&self, rank: usize, span: &ActionSpan) -> (usize, usize) {
        let stages = self.stages_of(rank);
        let chunk = stages.iter().position(|stage| *stage == span.action.stage);
        (chunk.unwrap_or(0), stages.len())
    }

    fn legend(&self) -> String {
        let ranks = 0..self.schedule().ranks();
        let kinds = self.kinds();
        let mut parts: Vec<String> = ActionKind::ALL
            .iter()
            .filter(|kind| kind.is_compute() && kinds.contains(kind))
            .map(|kind| format!("{} {kind}", kind.code()))
            .collect();
        parts.push(format!("{IDLE} waiting"));
        match ranks.map(|rank| self.stages_of(rank).len()).max() {
            Some(2) => parts.push("small letters: second stage of a rank".into()),
            Some(3..) => parts.push("after the point: stage of a rank".into()),
            _ => {}
        }
        parts.join(", ") + "\n"
    }
}

/// Formats a count: `1 rank`, `2 ranks`.
fn counted(number: usize, noun: &str, plural: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { plural })
}

/// Formats a number with at most 3 decimals.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
