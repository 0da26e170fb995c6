//! A simulation as lines of text.

use super::{ActionKind, Simulation, Span};

/// No block of the table is narrower than this.
const FEWEST_COLUMNS: usize = 20;
/// How many times as wide as its label an action may be drawn, so that one short action does not
/// stretch all others.
const WIDEST: f64 = 12.0;
const IDLE: char = '·';

impl Simulation {
    /// The schedule as text, at most `columns` characters wide: a row for each rank, time from left
    /// to right, broken into blocks where it is too long for a line; then what the letters mean,
    /// the total, the bubble, and the most stage-activations that live at once on each rank.
    ///
    /// Each computation begins with its letter and its micro-batch. Where a rank has two stages the
    /// letters of the second are small; where it has more, the stage of the rank follows a point.
    pub fn table(&self, columns: usize) -> String {
        let gutter = format!("r{} ", self.schedule().ranks() - 1).len();
        let width = columns.saturating_sub(gutter).max(FEWEST_COLUMNS);
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

    /// The total, the bubble and the live activations in one line.
    pub fn summary(&self) -> String {
        let schedule = self.schedule();
        let peaks: Vec<_> = self
            .peak_activations()
            .iter()
            .map(usize::to_string)
            .collect();
        format!(
            "{}: {} ranks, {} stages, {} micro-batches; total {}, bubble {:.3} %, \
             live stage-activations at most {}",
            schedule.name(),
            schedule.ranks(),
            schedule.stages(),
            schedule.micro_batches(),
            number(self.total()),
            100.0 * self.bubble(),
            peaks.join(" ")
        )
    }

    /// The computations of a rank that take time.
    fn computations(&self, rank: usize) -> impl Iterator<Item = &Span> {
        self.timeline(rank)
            .iter()
            .filter(|span| span.action.kind.is_compute() && span.end > span.start)
    }

    /// The scale at which the shortest computation has room for its label, and more if all fits
    /// into `width` then.
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
        let room = (width as f64 * shortest / self.total()).floor();
        let most = WIDEST * label as f64 / longest;
        (room.clamp(label as f64, label as f64 + 2.0) / shortest).min(most)
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

    fn label(&self, rank: usize, span: &Span) -> String {
        let letter = span.action.kind.code();
        let micro_batch = span.action.micro_batch;
        match self.place(rank, span) {
            (0, 1 | 2) => format!("{letter}{micro_batch}"),
            (_, 2) => format!("{}{micro_batch}", letter.to_lowercase()),
            (place, _) => format!("{letter}{micro_batch}.{place}"),
        }
    }

    /// Which of its rank's stages a computation belongs to, and how many there are.
    pub(super) fn place(&self, rank: usize, span: &Span) -> (usize, usize) {
        let stages = self.stages_of(rank);
        let place = stages.iter().position(|stage| *stage == span.action.stage);
        (place.unwrap_or(0), stages.len())
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

/// A number with at most 3 digits after the point.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
