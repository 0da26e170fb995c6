//! The losses of several runs in one picture.

use std::path::Path;

use plotters::prelude::*;

use super::{LossCurve, PlotError, svg};

/// Colors that are distinguishable also with red-green color blindness.
const COLORS: [RGBColor; 7] = [
    RGBColor(60, 60, 60),
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
];

/// Training and held-out losses of several runs over their steps, in nats per token.
///
/// Training losses are drawn as smoothed lines, held-out losses as dots. The first run is the reference.
#[derive(Clone, Debug, Default)]
pub struct LossComparison {
    title: String,
    runs: Vec<LossCurve>,
}

impl LossComparison {
    /// A picture without runs.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            runs: vec![],
        }
    }

    /// Adds a run, whose title is its name in the legend.
    pub fn with(mut self, run: LossCurve) -> Self {
        self.runs.push(run);
        self
    }

    /// The picture as an SVG of 960 x 540 pixels.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`].
    pub fn svg(&self) -> Result<String, PlotError> {
        svg::render(svg::CHART_SIZE, |area| self.draw_on(area))
    }

    /// Writes [`LossComparison::svg`] to a file.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] or [`PlotError::Io`].
    pub fn write_svg(&self, path: &Path) -> Result<(), PlotError> {
        super::write(path, &self.svg()?)
    }

    fn draw_on(&self, area: &svg::Area<'_>) -> Result<(), PlotError> {
        let bounds = |of: fn(&LossCurve) -> (f64, f64)| {
            let all = self.runs.iter().map(of);
            let all = all.reduce(|(a, b), (c, d)| (a.min(c), b.max(d)));
            all.unwrap_or_else(|| of(&LossCurve::default()))
        };
        let losses = bounds(LossCurve::losses);
        let (first, last) = bounds(|run| (run.steps().0 as f64, run.steps().1 as f64));
        let omitted = self.runs.iter().map(|run| run.omitted).sum();
        let axes = LossCurve {
            omitted,
            ..LossCurve::default()
        };
        let mut chart = svg::chart(area, &self.title, first as usize..last as usize, losses)?;
        svg::mesh(&mut chart, axes.step_label())?;
        for (run, color) in self.runs.iter().zip(COLORS.into_iter().cycle()) {
            chart
                .draw_series(LineSeries::new(run.smoothed(), color.stroke_width(2)))
                .map_err(svg::failed)?
                .label(&run.title)
                .legend(move |at| svg::legend_line(at, color, 2));
            let dot = |at: &(usize, f64)| Circle::new(*at, 4, color.filled());
            let dots = chart.draw_series(run.held_out.iter().map(dot));
            dots.map_err(svg::failed)?;
        }
        if self.runs.is_empty() {
            Ok(()) // an empty legend would be an empty box
        } else {
            svg::legend(&mut chart)
        }
    }
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
        ] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(!svg.contains("NaN"));
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
