//! Plots of a run as SVG or terminal text: the loss curve, the load of the experts, and a comparison of the losses of
//! several runs.

mod comparison;
mod heat_map;
mod svg;
mod terminal;

use std::path::Path;

use burn_megatron_plot::{PlotError, write};

pub use comparison::LossComparison;
pub use heat_map::ExpertHeatMap;

use super::metrics::{MetricsRecord, SkipReason};

/// Larger losses are omitted, because they would flatten the rest of the curve.
const MAX_LOSS: f64 = 1e30;

/// The maximum number of segments of a drawn curve.
const MAX_SEGMENTS: usize = 1000;

/// The minimum number of points of a smoothed curve.
const MIN_SMOOTHED: usize = 20;

/// The loss curve of a run: training and held-out losses over the steps, in nats per token. It includes the objective
/// if the objective differs from the cross-entropy.
///
/// Losses that are NaN, infinite or above 1e30 are counted but not drawn. The curve may have any number of points,
/// including zero.
///
/// ```
/// use burn_megatron_train::plot::LossCurve;
///
/// let mut curve = LossCurve::new("my run");
/// for step in 1..=20 {
///     curve.training(step, 5.0 - 0.1 * step as f64);
/// }
/// curve.held_out(20, 3.5);
/// assert_eq!(curve.terminal(80).lines().count(), 12);
/// assert!(curve.svg()?.contains("<svg"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct LossCurve {
    title: String,
    training: Vec<(usize, f64)>,
    held_out: Vec<(usize, f64)>,
    objective: Vec<(usize, f64)>,
    omitted: usize,
}

impl LossCurve {
    /// Creates a loss curve without points.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            ..Self::default()
        }
    }

    /// Creates the loss curve from the records of a metrics file, which [`read_metrics`](super::metrics::read_metrics)
    /// returns.
    pub fn from_records(title: impl Into<String>, records: &[MetricsRecord]) -> Self {
        let mut curve = Self::new(title);
        for record in records {
            match record {
                MetricsRecord::Run(_)
                | MetricsRecord::Experts(_)
                | MetricsRecord::ExpertLoad(_) => {}
                // A step without targets has no loss.
                MetricsRecord::Step(metrics)
                    if metrics.skip_reason == Some(SkipReason::NoTargets) => {}
                MetricsRecord::Step(metrics) => {
                    curve.training(metrics.step, metrics.loss);
                    let objective = metrics.minimised.objective;
                    objective
                        .into_iter()
                        .for_each(|value| curve.objective(metrics.step, value));
                }
                MetricsRecord::HeldOut(metrics) if metrics.tokens == 0 => {}
                MetricsRecord::HeldOut(metrics) => curve.held_out(metrics.step, metrics.loss),
            }
        }
        curve
    }

    /// Adds the training loss of `step`. Steps must be added in ascending order.
    pub fn training(&mut self, step: usize, loss: f64) {
        let usable = loss.abs() <= MAX_LOSS; // false for NaN
        if usable {
            self.training.push((step, loss))
        } else {
            self.omitted += 1
        }
    }

    /// Adds the objective of `step`, if it differs from the loss. Values that are not finite are omitted. The loss of
    /// such a step is not finite either, so the step is already counted.
    pub fn objective(&mut self, step: usize, objective: f64) {
        if objective.abs() <= MAX_LOSS {
            self.objective.push((step, objective));
        }
    }

    /// Adds the held-out loss after `step` updates. Steps must be added in ascending order.
    pub fn held_out(&mut self, step: usize, loss: f64) {
        let usable = loss.abs() <= MAX_LOSS;
        if usable {
            self.held_out.push((step, loss))
        } else {
            self.omitted += 1
        }
    }

    /// Returns the loss curve as an SVG with 960 x 540 pixels.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if the curve cannot be drawn.
    pub fn svg(&self) -> Result<String, PlotError> {
        svg::draw(self)
    }

    /// Writes the SVG of the loss curve to a file: see [`svg`](Self::svg).
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if the curve cannot be drawn, and [`PlotError::Io`] if the file cannot be written.
    pub fn write_svg(&self, path: &Path) -> Result<(), PlotError> {
        write(path, &self.svg()?)
    }

    /// Returns the loss curve as a text plot with 12 lines. The maximum line width is `columns` characters, or 40
    /// characters if `columns` is smaller than 40.
    pub fn terminal(&self, columns: usize) -> String {
        terminal::draw(self, columns)
    }

    /// Downsamples a long curve to the lowest and the highest point of each of [`MAX_SEGMENTS`] segments. The drawn
    /// curve looks the same.
    fn downsample(points: &[(usize, f64)]) -> Vec<(usize, f64)> {
        let n = points.len();
        if n <= 2 * MAX_SEGMENTS {
            return points.to_vec();
        }
        let by_loss = |a: &&(usize, f64), b: &&(usize, f64)| a.1.total_cmp(&b.1);
        points
            .chunks(n.div_ceil(MAX_SEGMENTS))
            .flat_map(|segment| {
                let lowest = segment.iter().min_by(by_loss).copied();
                let highest = segment.iter().max_by(by_loss).copied();
                if lowest < highest {
                    [lowest, highest]
                } else {
                    [highest, lowest]
                }
            })
            .flatten()
            .collect()
    }

    /// Returns whether there are enough points for [`LossCurve::smoothed`] to differ from the curve.
    fn is_smoothed(&self) -> bool {
        self.training.len() >= MIN_SMOOTHED
    }

    /// Returns the smoothed training curve at up to [`MAX_SEGMENTS`] points. Each point is the mean over a window of
    /// 1/20 of all points.
    ///
    /// The window is centered, so the curve does not lag. It shrinks towards the start, where the loss falls steeply,
    /// and is truncated at the end.
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
        let places = n.min(MAX_SEGMENTS);
        (0..places)
            .map(|place| place * (n - 1) / (places - 1))
            .map(|i| (self.training[i].0, mean(i)))
            .collect()
    }

    /// Returns the first and the last step. If they are equal, the last step is increased by 1.
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

    /// Returns the lowest and the highest loss with a margin, even if they are equal.
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

    /// Returns the label of the horizontal axis, with the number of omitted losses.
    fn step_label(&self) -> String {
        match self.omitted {
            0 => "step".to_string(),
            n => format!("step ({n} not finite, omitted)"),
        }
    }
}

#[cfg(test)]
mod tests;
