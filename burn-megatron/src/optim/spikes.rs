//! Detects spikes: steps whose loss or gradient norm is far above the values of the previous steps.

use std::collections::VecDeque;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Settings of the spike detection. A step is skipped as a spike if its loss or its gradient norm exceeds the mean over
/// a window of previous steps by more than `sigmas` standard deviations.
///
/// The rule follows `SkipStepOptimizer` of OLMo-core. No step is skipped until half of the window is filled. Skipped
/// steps are also added to the window, so that a lasting change is eventually accepted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SpikeConfig {
    /// The threshold above the mean, in standard deviations.
    pub sigmas: f64,
    /// The number of previous steps in the window.
    pub window: usize,
}

impl Default for SpikeConfig {
    fn default() -> Self {
        Self {
            sigmas: 6.0,
            window: 128,
        }
    }
}

impl SpikeConfig {
    /// The maximum window.
    const MOST: usize = 1 << 16;

    /// Whether both settings are valid.
    pub fn is_valid(&self) -> bool {
        self.sigmas.is_finite() && self.sigmas > 0.0 && (2..=Self::MOST).contains(&self.window)
    }
}

/// The window of the spike detection: the losses and gradient norms of the last steps. A checkpoint saves their bits as
/// integers, because JSON preserves integers exactly.
///
/// ```
/// use burn_megatron::optim::{SpikeConfig, SpikeWindow};
///
/// let config = SpikeConfig { sigmas: 4.0, window: 8 };
/// let mut window = SpikeWindow::default();
/// for loss in [2.1, 1.9, 2.1, 1.9] {
///     window.push(&config, loss, 1.0);
/// }
/// assert!(!window.is_spike(&config, 2.2, 1.0));
/// assert!(window.is_spike(&config, 9.0, 1.0));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpikeWindow {
    losses: VecDeque<u64>,
    norms: VecDeque<u64>,
}

impl SpikeWindow {
    /// Whether a step with this loss and gradient norm is a spike, compared with the steps in the window.
    pub fn is_spike(&self, config: &SpikeConfig, loss: f64, norm: f64) -> bool {
        let least = (config.window / 2).max(2);
        let exceeds = |values: &VecDeque<u64>, value: f64| {
            let values: Vec<f64> = values.iter().map(|bits| f64::from_bits(*bits)).collect();
            let count = values.len() as f64;
            let mean = values.iter().sum::<f64>() / count;
            let squares = values.iter().map(|value| (value - mean).powi(2));
            let deviation = (squares.sum::<f64>() / (count - 1.0)).sqrt();
            value > mean + config.sigmas * deviation
        };
        self.losses.len() >= least && (exceeds(&self.losses, loss) || exceeds(&self.norms, norm))
    }

    /// Adds the loss and the gradient norm of a step to the window. Both must be finite.
    pub fn push(&mut self, config: &SpikeConfig, loss: f64, norm: f64) {
        for (values, value) in [(&mut self.losses, loss), (&mut self.norms, norm)] {
            values.push_back(value.to_bits());
            while values.len() > config.window {
                values.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_far_above_the_window_is_a_spike() {
        let config = SpikeConfig {
            sigmas: 3.0,
            window: 8,
        };
        let mut window = SpikeWindow::default();
        for step in 0..4 {
            assert!(
                !window.is_spike(&config, 1e9, 1e9),
                "{step} steps are too few"
            );
            window.push(&config, 2.0 + f64::from(step % 2), 1.0);
        }
        // Mean 2.5, deviation 1 / sqrt(3).
        assert!(!window.is_spike(&config, 4.2, 1.0));
        assert!(window.is_spike(&config, 4.3, 1.0));
        assert!(window.is_spike(&config, 2.0, 1.1));
        // A lasting change is accepted once it fills the window.
        let taken = (0..8).map(|_| {
            let spike = window.is_spike(&config, 9.0, 1.0);
            window.push(&config, 9.0, 1.0);
            spike
        });
        let taken: Vec<_> = taken.collect();
        assert!(taken[0] && !taken[7], "{taken:?}");
        let saved = serde_json::to_string(&window).unwrap();
        assert_eq!(serde_json::from_str::<SpikeWindow>(&saved).unwrap(), window);
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for (sigmas, window) in [
            (0.0, 8),
            (f64::NAN, 8),
            (f64::INFINITY, 8),
            (6.0, 1),
            (6.0, 1 << 20),
        ] {
            assert!(
                !SpikeConfig { sigmas, window }.is_valid(),
                "{sigmas} {window}"
            );
        }
        assert!(SpikeConfig::default().is_valid());
    }
}
