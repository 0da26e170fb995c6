//! The losses of several runs in one plot.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use burn_megatron_plot::{Area, PlotError, TEXT, failed, render};
use plotters::prelude::*;

use super::{LossCurve, svg, terminal};

/// Colors that are distinguishable with red-green color blindness.
const COLORS: [RGBColor; 7] = [
    RGBColor(60, 60, 60),
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
];

/// The height of the plot of differences, in pixels.
const DIFFERENCES: u32 = 260;

/// The largest line width, in pixels.
const MAX_LINE: u32 = 8;

/// A plot that compares the training and held-out losses of several runs over their steps, in nats per token. Below the
/// losses it shows the difference between each run and the first run, which is the reference.
///
/// Training losses are drawn as smoothed lines, and held-out losses are drawn as dots. Earlier runs have wider lines,
/// so that later runs with equal losses do not hide them.
#[derive(Clone, Debug, Default)]
pub struct LossComparison {
    title: String,
    pub(super) runs: Vec<LossCurve>,
}

impl LossComparison {
    /// Creates a plot without runs.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            runs: vec![],
        }
    }

    /// Adds a run to the plot. The title of the curve is the name of the run in the legend.
    pub fn with(mut self, run: LossCurve) -> Self {
        self.runs.push(run);
        self
    }

    /// Returns the plot as an SVG that is 960 pixels wide.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if the plot cannot be drawn.
    pub fn svg(&self) -> Result<String, PlotError> {
        let (width, height) = svg::CHART_SIZE;
        if self.runs.len() < 2 {
            return render((width, height), |area| self.draw_losses(area));
        }
        render((width, height + DIFFERENCES), |area| {
            let (losses, differences) = area.split_vertically(height);
            self.draw_losses(&losses)?;
            self.draw_differences(&differences)
        })
    }

    /// Writes the SVG of the plot to a file: see [`svg`](Self::svg).
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if the plot cannot be drawn, and [`PlotError::Io`] if the file cannot be written.
    pub fn write_svg(&self, path: &Path) -> Result<(), PlotError> {
        super::write(path, &self.svg()?)
    }

    /// Returns the smoothed training losses as a text plot with 12 lines. The maximum line width is `columns`
    /// characters, or 40 characters if `columns` is smaller than 40. The curve of each run is drawn with the number of
    /// the run, counted from 1.
    pub fn terminal(&self, columns: usize) -> String {
        terminal::draw_runs(self, columns)
    }

    /// Returns the first and the last step of all runs.
    pub(super) fn steps(&self) -> Range<usize> {
        let steps = self.runs.iter().map(LossCurve::steps);
        let all = steps.reduce(|(a, b), (c, d)| (a.min(c), b.max(d)));
        let (first, last) = all.unwrap_or_else(|| LossCurve::default().steps());
        first..last
    }

    /// Returns the lowest and the highest loss of all runs.
    pub(super) fn losses(&self) -> (f64, f64) {
        let losses = self.runs.iter().map(LossCurve::losses);
        let losses = losses.reduce(|(a, b), (c, d)| (a.min(c), b.max(d)));
        losses.unwrap_or_else(|| LossCurve::default().losses())
    }

    pub(super) fn step_label(&self) -> String {
        let omitted = self.runs.iter().map(|run| run.omitted).sum();
        let axes = LossCurve {
            omitted,
            ..LossCurve::default()
        };
        axes.step_label()
    }

    /// Returns the runs with their styles.
    fn styled(&self) -> impl Iterator<Item = (&LossCurve, RGBColor, u32)> {
        let colors = self.runs.iter().zip(COLORS.into_iter().cycle());
        let runs = self.runs.len();
        colors.enumerate().map(move |(number, (run, color))| {
            let later = (runs - 1 - number) as u32;
            (run, color, (2 + 2 * later).min(MAX_LINE))
        })
    }

    fn draw_losses(&self, area: &Area<'_>) -> Result<(), PlotError> {
        let mut chart = svg::chart(area, &self.title, self.steps(), self.losses())?;
        svg::mesh(&mut chart, self.step_label())?;
        for (run, color, width) in self.styled() {
            chart
                .draw_series(LineSeries::new(run.smoothed(), color.stroke_width(width)))
                .map_err(failed)?
                .label(&run.title)
                .legend(move |at| svg::legend_line(at, color, width));
        }
        let dots = self
            .styled()
            .flat_map(|(run, color, width)| dots(&run.held_out, color, width));
        let series = chart.draw_series(dots).map_err(failed)?;
        if self.runs.iter().any(|run| !run.held_out.is_empty()) {
            series
                .label("held-out")
                .legend(|(x, y)| Circle::new((x + 14, y), 4, TEXT.filled()));
        }
        if self.runs.is_empty() {
            Ok(()) // an empty legend would be an empty box
        } else {
            svg::legend(&mut chart)
        }
    }

    fn draw_differences(&self, area: &Area<'_>) -> Result<(), PlotError> {
        let Some((first, others)) = self.runs.split_first() else {
            return Ok(());
        };
        let (smoothed, others) = (first.smoothed(), others.iter());
        let training = others
            .clone()
            .map(|run| difference(&run.smoothed(), &smoothed));
        let training: Vec<_> = training.collect();
        let held_out = others.map(|run| difference(&run.held_out, &first.held_out));
        let held_out: Vec<_> = held_out.collect();
        let all = training.iter().chain(&held_out).flatten();
        let most = all.map(|&(_, loss)| loss.abs()).fold(0.0, f64::max);
        // A range above zero, even if all runs are equal.
        let most = 1.1 * if most > 0.0 { most } else { 1e-3 };
        let mut chart = svg::chart(area, "", self.steps(), (-most, most))?;
        svg::mesh_of(&mut chart, self.step_label(), "difference", 5)?;
        for (i, (_, color, width)) in self.styled().skip(1).enumerate() {
            // Lines of differences rarely overlap, so they can be thinner.
            let width = 1 + width / 2;
            let line = LineSeries::new(training[i].iter().copied(), color.stroke_width(width));
            chart.draw_series(line).map_err(failed)?;
            let dots = dots(&held_out[i], color, width);
            chart.draw_series(dots).map_err(failed)?;
        }
        Ok(())
    }
}

/// Draws circles that stay visible around the circles of a later run at the same place.
fn dots(
    points: &[(usize, f64)],
    color: RGBColor,
    width: u32,
) -> impl Iterator<Item = Circle<(usize, f64), u32>> {
    let dot = move |at: &(usize, f64)| Circle::new(*at, 3 + width / 2, color.filled());
    points.iter().map(dot)
}

/// Returns the difference between the losses of a run and of the reference at equal steps.
fn difference(run: &[(usize, f64)], reference: &[(usize, f64)]) -> Vec<(usize, f64)> {
    let reference: BTreeMap<_, _> = reference.iter().copied().collect();
    let less = |&(step, loss): &(usize, f64)| Some((step, loss - reference.get(&step)?));
    run.iter().filter_map(less).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, steps: usize) -> LossCurve {
        let mut run = LossCurve::new(name);
        (0..steps).for_each(|step| run.training(step, 5.0 - step as f64 / 100.0));
        run.held_out(steps, 4.5);
        run
    }

    #[test]
    fn each_run_has_its_number_on_the_terminal() {
        let high = (0..30).fold(LossCurve::new("high"), |mut run, step| {
            run.training(step, 6.0);
            run
        });
        let runs = LossComparison::new("").with(run("low", 30)).with(high);
        let text = runs.clone().with(run("low again", 30)).terminal(60);
        assert_eq!(text.lines().count(), 12, "{text}");
        assert!(
            text.lines().all(|line| line.chars().count() <= 60),
            "{text}"
        );
        let plot = |line: &str| {
            line.split_once(['┤', '│'])
                .map(|(_, plot)| plot.to_string())
        };
        let rows: Vec<_> = text.lines().filter_map(plot).collect();
        // The line of 6.0 is the highest. The line of the third run is hidden behind the first.
        assert!(rows[0].ends_with("222") && !rows[0].contains('1'), "{text}");
        assert!(rows[1..].iter().any(|row| row.contains("11")), "{text}");
        assert!(
            !text.contains('3') || text.matches('3').count() < 3,
            "{text}"
        );
        // Nothing is drawn where a run has no steps.
        let text = runs.with(run("long", 60)).terminal(60);
        let row = text.lines().nth(1).unwrap();
        assert!(row.ends_with("222") && row.chars().count() < 40, "{text}");
        for columns in [0, 40, 200] {
            LossComparison::default().terminal(columns);
        }
    }

    #[test]
    fn every_run_is_named() {
        let picture = LossComparison::new("8 bits against 16")
            .with(run("bf16", 30))
            .with(run("mxfp8", 200));
        let svg = picture.svg().unwrap();
        for text in [
            "8 bits against 16",
            "bf16",
            "mxfp8",
            "loss (nats per token)",
            "held-out",
            "difference",
        ] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn differences_are_those_at_the_same_steps() {
        let of = |points: &[(usize, f64)]| difference(points, &[(1, 2.0), (3, 1.0)]);
        assert_eq!(of(&[(1, 2.5), (2, 9.0), (3, 0.75)]), [(1, 0.5), (3, -0.25)]);
        let same = LossComparison::new("")
            .with(run("a", 30))
            .with(run("b", 30));
        let svg = same.svg().unwrap();
        // The reference is wider, and shows on both sides of the other.
        assert!(svg.contains("stroke-width=\"4\"") && svg.contains("stroke-width=\"2\""));
    }

    #[test]
    fn no_runs_and_runs_without_points_can_be_drawn() {
        let empty = LossComparison::new("nothing");
        let with = empty.clone().with(LossCurve::new("a run"));
        for picture in [empty, with] {
            assert!(picture.svg().unwrap().trim_end().ends_with("</svg>"));
        }
    }

    #[test]
    fn omitted_losses_are_counted_over_all_runs() {
        let mut diverged = run("diverged", 3);
        diverged.training(3, f64::NAN);
        let svg = LossComparison::new("")
            .with(run("fine", 3))
            .with(diverged)
            .svg();
        assert!(svg.unwrap().contains("1 not finite, omitted"));
    }
}
