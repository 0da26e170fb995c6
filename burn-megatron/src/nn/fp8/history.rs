//! Delayed scaling: the scale of a step from the magnitudes of previous steps. Pure values.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::config::{AmaxAlgorithm, DelayedScaling};

/// The largest magnitudes of the last steps, and the scale computed from them.
///
/// After each step, with `max` the largest value of the format (Transformer Engine's delayed scaling;
/// Micikevicius et al. 2022, arXiv:2209.05433):
///
/// ```text
/// amax  = the last magnitude of the history, or the largest of it
/// scale = (max 2^-margin) / amax    if amax is finite and above 0, else the previous scale
/// ```
///
/// An infinite quotient becomes the largest float. The first scale is 1. A step whose magnitude is
/// infinite or NaN keeps the scale and is ignored by the maximum of later steps: otherwise one overflow
/// of loss scaling would fix the scale for the length of the history.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AmaxHistory {
    settings: DelayedScaling,
    /// The largest value of the format.
    max: f32,
    /// Newest first; zeros before the first step.
    amaxes: VecDeque<f32>,
    scale: f32,
}

/// A history and its scale, as in a checkpoint: floats as their bits, so that none is rounded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleState {
    /// The bits of the scale, an f32.
    pub scale: u32,
    /// The bits of the largest magnitudes, f32, newest first.
    pub history: Vec<u32>,
}

impl AmaxHistory {
    pub fn new(settings: DelayedScaling, max: f32) -> Self {
        Self {
            settings,
            max,
            amaxes: VecDeque::from(vec![0.0; settings.history]),
            scale: 1.0,
        }
    }

    /// The factor that values are multiplied with.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Ends a step whose largest magnitude was `amax`, at least 0 or NaN.
    pub fn roll(&mut self, amax: f32) {
        self.amaxes.push_front(amax);
        self.amaxes.truncate(self.settings.history);
        let amax = match self.settings.amax {
            AmaxAlgorithm::MostRecent => amax,
            AmaxAlgorithm::Max if amax.is_finite() => {
                let finite = self.amaxes.iter().filter(|amax| amax.is_finite());
                finite.copied().fold(0.0, f32::max)
            }
            AmaxAlgorithm::Max => amax,
        };
        if amax.is_finite() && amax > 0.0 {
            let margin = 2f32.powi(-self.settings.margin);
            self.scale = (self.max * margin / amax).min(f32::MAX);
        }
    }

    pub fn state(&self) -> ScaleState {
        ScaleState {
            scale: self.scale.to_bits(),
            history: self.amaxes.iter().map(|amax| amax.to_bits()).collect(),
        }
    }

    /// Restores a state.
    ///
    /// # Errors
    ///
    /// Why the state does not fit.
    pub fn restore(&mut self, state: &ScaleState) -> Result<(), String> {
        let (saved, expected) = (state.history.len(), self.settings.history);
        if saved != expected {
            return Err(format!(
                "its history has {saved} steps, expected {expected}; set history = {saved}"
            ));
        }
        let scale = f32::from_bits(state.scale);
        if !(scale.is_finite() && scale > 0.0) {
            return Err(format!(
                "invalid scale {scale}: expected a finite number above 0"
            ));
        }
        if let Some(bits) = state.history.iter().find(|bits| **bits > i32::MAX as u32) {
            let amax = f32::from_bits(*bits);
            return Err(format!("invalid magnitude {amax}: expected at least 0"));
        }
        self.scale = scale;
        self.amaxes = state
            .history
            .iter()
            .map(|bits| f32::from_bits(*bits))
            .collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;

    fn history(margin: i32, history: usize, amax: AmaxAlgorithm) -> AmaxHistory {
        let settings = DelayedScaling {
            margin,
            history,
            amax,
        };
        AmaxHistory::new(settings, 448.0)
    }

    /// Each step's magnitude, and the scale after it.
    #[track_caller]
    fn assert_follows(mut history: AmaxHistory, script: &[(f32, f32)]) {
        assert_eq!(history.scale(), 1.0, "the first scale");
        for (step, (amax, scale)) in script.iter().enumerate() {
            history.roll(*amax);
            assert_eq!(history.scale(), *scale, "after step {step}, of {amax}");
        }
    }

    #[test]
    fn the_most_recent_magnitude_counts_alone() {
        let script = [
            (0.0, 1.0),
            (4.0, 112.0),
            (448.0, 1.0),
            (7.0, 64.0),
            (0.0, 64.0),
            (INF, 64.0),
            (NAN, 64.0),
            (14.0, 32.0),
            // 448 / 1e-40 is beyond all floats.
            (1e-40, f32::MAX),
            (3.0, 448.0 / 3.0),
        ];
        for length in [1, 2, 1024] {
            assert_follows(history(0, length, AmaxAlgorithm::MostRecent), &script);
        }
    }

    #[test]
    fn the_largest_magnitude_counts_until_it_is_forgotten() {
        let script = [
            (2.0, 224.0),
            (7.0, 64.0),
            (3.5, 64.0),
            (1.75, 64.0),
            (1.75, 128.0),
            (0.0, 256.0),
            (0.0, 256.0),
            // Nothing but zeros is left: the scale stays.
            (0.0, 256.0),
            (56.0, 8.0),
        ];
        assert_follows(history(0, 3, AmaxAlgorithm::Max), &script);
    }

    #[test]
    fn what_is_not_finite_holds_the_scale_of_its_step_alone() {
        for bad in [INF, NAN] {
            let script = [
                (7.0, 64.0),
                (bad, 64.0),
                (14.0, 32.0),
                (3.5, 32.0),
                (3.5, 32.0),
                (3.5, 128.0),
            ];
            assert_follows(history(0, 3, AmaxAlgorithm::Max), &script);
        }
        let script = [
            (INF, 1.0),
            (NAN, 1.0),
            (7.0, 64.0),
            (0.0, 64.0),
            (0.0, 64.0),
        ];
        assert_follows(history(0, 2, AmaxAlgorithm::Max), &script);
    }

    #[test]
    fn a_length_of_one_is_the_most_recent() {
        let script = [(7.0, 64.0), (NAN, 64.0), (3.5, 128.0), (0.0, 128.0)];
        assert_follows(history(0, 1, AmaxAlgorithm::Max), &script);
    }

    #[test]
    fn a_margin_leaves_binary_orders_of_magnitude() {
        assert_follows(
            history(3, 4, AmaxAlgorithm::Max),
            &[(7.0, 8.0), (14.0, 4.0)],
        );
        assert_follows(history(-1, 4, AmaxAlgorithm::MostRecent), &[(7.0, 128.0)]);
    }

    #[test]
    fn a_state_brings_back_every_bit() {
        let mut left = history(1, 4, AmaxAlgorithm::Max);
        [3.3, NAN, 1e-39, INF]
            .into_iter()
            .for_each(|amax| left.roll(amax));
        let state = left.state();
        let text = serde_json::to_string(&state).unwrap();
        let mut right = history(1, 4, AmaxAlgorithm::Max);
        right
            .restore(&serde_json::from_str(&text).unwrap())
            .unwrap();
        assert_eq!(right.state(), state);
        for amax in [5.5, 0.1, 0.2, 0.3, 0.4] {
            left.roll(amax);
            right.roll(amax);
            assert_eq!(left.state(), right.state(), "{amax}");
        }
    }

    #[test]
    fn a_state_that_does_not_fit_changes_nothing() {
        let mut history = history(0, 2, AmaxAlgorithm::Max);
        history.roll(7.0);
        let before = history.state();
        let with = |scale: f32, amaxes: &[f32]| ScaleState {
            scale: scale.to_bits(),
            history: amaxes.iter().map(|amax| amax.to_bits()).collect(),
        };
        let refused = [
            (with(1.0, &[1.0]), "1 steps"),
            (with(0.0, &[1.0, 1.0]), "invalid scale 0"),
            (with(-2.0, &[1.0, 1.0]), "invalid scale -2"),
            (with(NAN, &[1.0, 1.0]), "invalid scale NaN"),
            (with(1.0, &[1.0, -1.0]), "invalid magnitude -1"),
        ];
        for (state, reason) in refused {
            let error = history.restore(&state).unwrap_err();
            assert!(error.contains(reason), "{error}");
            assert_eq!(history.state(), before);
        }
    }
}
