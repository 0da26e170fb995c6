//! The loss curve as lines of text: a curve of Braille dots with axes and labels.

use textplots::{Chart, Plot, Shape};

use super::{LossComparison, LossCurve};

/// The number of text lines of the curve. Three more lines show the legend, the axis and its labels.
const ROWS: usize = 9;
/// The number of characters before the curve: a label and the axis.
const GUTTER: usize = 10;
const MIN_COLUMNS: usize = 40;
const LOSS: &str = "loss (nats per token)";
/// The width and the height of a Braille character, in dots.
const DOTS: (usize, usize) = (2, 4);

pub(super) fn draw(curve: &LossCurve, columns: usize) -> String {
    let width = columns.max(MIN_COLUMNS) - GUTTER;
    let mut cells = braille(curve, width);
    mark_held_out(curve, &mut cells);

    let label = curve.step_label();
    header(curve, width + GUTTER) + &framed(&cells, curve.losses(), curve.steps(), &label)
}

/// Draws the smoothed training losses of several runs. Each run is drawn with its number from 1. Where runs meet, the
/// number of the first run is drawn.
pub(super) fn draw_runs(runs: &LossComparison, columns: usize) -> String {
    let width = columns.max(MIN_COLUMNS) - GUTTER;
    let (steps, losses) = (runs.steps(), runs.losses());
    let mut cells = vec![vec![' '; width]; ROWS];
    for (number, run) in runs.runs.iter().enumerate().rev() {
        // Runs from the tenth on are drawn with letters.
        let mark = char::from_digit(number as u32 + 1, 36).unwrap_or('*');
        let points = run.smoothed();
        let at = |column: usize| {
            let part = column as f64 / (width - 1) as f64;
            steps.start as f64 + part * (steps.end - steps.start) as f64
        };
        let losses_at = (0..width).map(|column| interpolated(&points, at(column)));
        for (column, loss) in losses_at.enumerate() {
            let Some(loss) = loss else { continue };
            let down = (losses.1 - loss) / (losses.1 - losses.0) * (ROWS - 1) as f64;
            cells[(down.round() as usize).min(ROWS - 1)][column] = mark;
        }
    }
    let steps = (steps.start, steps.end);
    let label = runs.step_label();
    format!(
        "{LOSS}, training\n{}",
        framed(&cells, losses, steps, &label)
    )
}

/// Returns the interpolated value at a step; `None` outside of the curve.
fn interpolated(points: &[(usize, f64)], at: f64) -> Option<f64> {
    let next = points.iter().position(|(step, _)| *step as f64 >= at)?;
    let (step, loss) = points[next];
    if step as f64 == at {
        return Some(loss);
    }
    let (earlier, before) = points[next.checked_sub(1)?];
    let part = (at - earlier as f64) / (step - earlier) as f64;
    Some(before + part * (loss - before))
}

/// Returns the lines of a chart with its axes.
fn framed(
    cells: &[Vec<char>],
    (low, high): (f64, f64),
    steps: (usize, usize),
    label: &str,
) -> String {
    let mut text = String::new();
    for (row, cells) in cells.iter().enumerate() {
        // The first, the middle and the last row are labelled with the loss at their centers.
        let label = if row % (ROWS / 2) == 0 {
            let below_top = (row as f64 + 0.5) / ROWS as f64;
            number(high - below_top * (high - low))
        } else {
            String::new()
        };
        let axis = if label.is_empty() { '│' } else { '┤' };
        let line: String = cells.iter().collect();
        text += format!("{label:>8} {axis}{}", line.trim_end()).trim_end();
        text.push('\n');
    }
    text + &footer(steps, label, cells[0].len())
}

/// Returns the dots of the training curve as `ROWS` lines of `width` characters.
fn braille(curve: &LossCurve, width: usize) -> Vec<Vec<char>> {
    let points: Vec<(f32, f32)> = curve
        .smoothed()
        .iter()
        .map(|&(step, loss)| (step as f32, loss as f32))
        .collect();
    let shape = if points.len() == 1 {
        Shape::Points(&points)
    } else {
        Shape::Lines(&points)
    };
    let (first, last) = curve.steps();
    let (low, high) = curve.losses();
    let (dots_x, dots_y) = canvas(width);
    let mut chart = Chart::new_with_y_range(
        dots_x as u32,
        dots_y as u32,
        first as f32,
        last as f32,
        low as f32,
        high as f32,
    );
    let chart = chart.lineplot(&shape);
    chart.figures();
    let frame = chart.frame();
    let mut lines = frame.lines();
    let row = |line: Option<&str>| -> Vec<char> {
        line.unwrap_or("")
            .chars()
            .chain(std::iter::repeat(' '))
            .take(width)
            .collect()
    };
    (0..ROWS).map(|_| row(lines.next())).collect()
}

/// Marks each held-out loss with an `o`.
fn mark_held_out(curve: &LossCurve, cells: &mut [Vec<char>]) {
    let (first, last) = curve.steps();
    let (low, high) = curve.losses();
    for &(step, loss) in &curve.held_out {
        let width = cells[0].len();
        let (dots_x, dots_y) = canvas(width);
        let right = (step - first) as f64 / (last - first) as f64 * dots_x as f64;
        let down = (high - loss) / (high - low) * dots_y as f64;
        let (column, row) = (
            right.round() as usize / DOTS.0,
            down.round() as usize / DOTS.1,
        );
        cells[row.min(ROWS - 1)][column.min(width - 1)] = 'o';
    }
}

/// Returns the largest dot coordinates of a curve `width` characters wide.
fn canvas(width: usize) -> (usize, usize) {
    (DOTS.0 * width - 1, DOTS.1 * ROWS - 1)
}

fn header(curve: &LossCurve, columns: usize) -> String {
    let name = LOSS;
    let mut legend = Vec::new();
    if !curve.training.is_empty() {
        legend.push("⠒⠒ training");
    }
    if !curve.held_out.is_empty() {
        legend.push("o held-out");
    }
    let legend = if legend.is_empty() {
        "no values".to_string()
    } else {
        legend.join("  ")
    };
    let space = columns.saturating_sub(name.chars().count() + legend.chars().count());
    if space == 0 {
        return format!("{legend}\n"); // the narrowest plot is too narrow for both
    }
    format!("{name}{}{legend}\n", " ".repeat(space))
}

fn footer((first, last): (usize, usize), label: &str, width: usize) -> String {
    let (first, last) = (first.to_string(), last.to_string());
    let between = width.saturating_sub(first.len() + last.len());
    let axis = format!("{:>GUTTER$}{}", '└', "─".repeat(width));
    // A narrow axis has numbers but no label.
    let label = if label.len() + 2 <= between {
        label
    } else {
        ""
    };
    format!("{axis}\n{:GUTTER$}{first}{label:^between$}{last}\n", "")
}

/// Formats a loss in at most 8 characters.
fn number(value: f64) -> String {
    match value.abs() {
        size if size < 100.0 => format!("{value:.3}"),
        size if size < 100_000.0 => format!("{value:.1}"),
        _ => format!("{value:.1e}"),
    }
}
