//! The loss curve of a run, as a picture and in the terminal; those of several runs in one picture.

mod comparison;
mod svg;
mod terminal;

use std::io;
use std::path::{Path, PathBuf};

pub use comparison::Comparison;

use super::metrics::{Record, SkipReason};
use crate::partial::replace_file;

/// A loss further from zero than this says only that the run diverged, and would flatten all
/// others.
const LARGEST: f64 = 1e30;

/// No picture shows more pieces of a curve than this.
const BUCKETS: usize = 1000;

/// Curves of fewer points are drawn as they are.
const SMOOTHED_FROM: usize = 20;

/// Why a curve cannot be drawn.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// The drawing failed.
    #[error("cannot draw the loss curve: {0}")]
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

/// Training and held-out losses over the steps of a run, in nats per token, and what training minimises
/// where that is something else.
///
/// Losses that are NaN, infinite or beyond 1e30 are counted, not drawn. Any number of points can be
/// drawn, none included.
#[derive(Debug, Clone, Default)]
pub struct LossCurve {
    title: String,
    training: Vec<(usize, f64)>,
    held_out: Vec<(usize, f64)>,
    objective: Vec<(usize, f64)>,
    left_out: usize,
}

impl LossCurve {
    /// A curve without points.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            ..Self::default()
        }
    }

    /// The curve of a metrics file, as [`read_metrics`](super::metrics::read_metrics) gives it.
    pub fn from_records(title: impl Into<String>, records: &[Record]) -> Self {
        let mut curve = Self::new(title);
        for record in records {
            match record {
                Record::Run(_) => {}
                // It has no loss.
                Record::Step(metrics) if metrics.skip_reason == Some(SkipReason::NoTargets) => {}
                Record::Step(metrics) => {
                    curve.training(metrics.step, metrics.loss);
                    let objective = metrics.minimised.objective;
                    objective
                        .into_iter()
                        .for_each(|value| curve.objective(metrics.step, value));
                }
                Record::HeldOut(metrics) if metrics.tokens == 0 => {}
                Record::HeldOut(metrics) => curve.held_out(metrics.step, metrics.loss),
            }
        }
        curve
    }

    /// Adds the loss of the global batch of `step`. Steps come in rising order.
    pub fn training(&mut self, step: usize, loss: f64) {
        let usable = loss.abs() <= LARGEST; // false for NaN
        if usable {
            self.training.push((step, loss))
        } else {
            self.left_out += 1
        }
    }

    /// Adds what was minimised in `step`, where that is more than its loss. What is not finite is left out,
    /// as the loss beside it is not finite either, and counted.
    pub fn objective(&mut self, step: usize, objective: f64) {
        if objective.abs() <= LARGEST {
            self.objective.push((step, objective));
        }
    }

    /// Adds the held-out loss of the weights after `step` updates. Steps come in rising order.
    pub fn held_out(&mut self, step: usize, loss: f64) {
        let usable = loss.abs() <= LARGEST;
        if usable {
            self.held_out.push((step, loss))
        } else {
            self.left_out += 1
        }
    }

    /// The curve as an SVG of 960 x 540 pixels.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`].
    pub fn svg(&self) -> Result<String, PlotError> {
        svg::draw(self)
    }

    /// Writes [`LossCurve::svg`] to a file.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] or [`PlotError::Io`].
    pub fn write_svg(&self, path: &Path) -> Result<(), PlotError> {
        write(path, &self.svg()?)
    }

    /// The curve as 12 lines of text, at most `columns` (and at least 40) characters wide.
    pub fn terminal(&self, columns: usize) -> String {
        terminal::draw(self, columns)
    }

    /// A curve, but of a long run only the lowest and the highest point of each of [`BUCKETS`] pieces:
    /// it looks the same, and the picture stays small.
    fn outline(points: &[(usize, f64)]) -> Vec<(usize, f64)> {
        let n = points.len();
        if n <= 2 * BUCKETS {
            return points.to_vec();
        }
        let by_loss = |a: &&(usize, f64), b: &&(usize, f64)| a.1.total_cmp(&b.1);
        points
            .chunks(n.div_ceil(BUCKETS))
            .flat_map(|piece| {
                let lowest = piece.iter().min_by(by_loss).copied();
                let highest = piece.iter().max_by(by_loss).copied();
                if lowest < highest {
                    [lowest, highest]
                } else {
                    [highest, lowest]
                }
            })
            .flatten()
            .collect()
    }

    /// Whether there are enough points for [`LossCurve::smoothed`] to differ from the curve.
    fn is_smoothed(&self) -> bool {
        self.training.len() >= SMOOTHED_FROM
    }

    /// The training curve without most of its noise, at up to [`BUCKETS`] places: the mean over a
    /// window of a twentieth of all points.
    ///
    /// The window is centred, so that the curve does not lag. It shrinks towards the start, where
    /// the loss falls steeply, and is cut off at the end, where it does not.
    fn smoothed(&self) -> Vec<(usize, f64)> {
        let n = self.training.len();
        if !self.is_smoothed() {
            return self.training.clone();
        }
        let mean = |i: usize| {
            let radius = (n / 40).max(1).min(i);
            let window = &self.training[i - radius..(i + radius + 1).min(n)];
            window.iter().map(|&(_, loss)| loss).sum::<f64>() / window.len() as f64
        };
        let places = n.min(BUCKETS);
        (0..places)
            .map(|place| place * (n - 1) / (places - 1))
            .map(|i| (self.training[i].0, mean(i)))
            .collect()
    }

    /// The first and the last step; one further if they are the same.
    fn steps(&self) -> (usize, usize) {
        let steps = || {
            self.training
                .iter()
                .chain(&self.held_out)
                .map(|&(step, _)| step)
        };
        let first = steps().min().unwrap_or(0);
        let last = steps().max().unwrap_or(0);
        (first.min(usize::MAX - 1), last.max(first.saturating_add(1)))
    }

    /// The lowest and the highest loss with a margin, wide enough to be told apart when they are
    /// the same.
    fn losses(&self) -> (f64, f64) {
        let losses = || {
            self.training
                .iter()
                .chain(&self.held_out)
                .chain(&self.objective)
                .map(|&(_, loss)| loss)
        };
        let (low, high) = (losses().reduce(f64::min), losses().reduce(f64::max));
        let (low, high) = (low.unwrap_or(0.0), high.unwrap_or(1.0));
        let margin = (0.05 * (high - low))
            .max(1e-3 * high.abs().max(low.abs()))
            .max(1e-3);
        (low - margin, high + margin)
    }

    /// The name of the horizontal axis; it says what is missing.
    fn step_label(&self) -> String {
        match self.left_out {
            0 => "step".to_string(),
            n => format!("step ({n} not finite, left out)"),
        }
    }
}

fn write(path: &Path, text: &str) -> Result<(), PlotError> {
    replace_file(path, text.as_bytes()).map_err(|source| PlotError::Io {
        path: path.to_path_buf(),
        source,
    })
}

#[cfg(test)]
mod tests;
