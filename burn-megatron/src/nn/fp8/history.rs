//! Delayed scaling: the scale of a step is computed from the magnitudes of previous steps. See [`next_scales`].

use burn_megatron_kernels::fp8::ScaleRule;
#[cfg(doc)]
use burn_megatron_kernels::fp8::next_scales;
use serde::{Deserialize, Serialize};

use super::config::{AmaxAlgorithm, DelayedScaling};

/// The delayed-scaling state of one operand, as stored in a checkpoint: its scale and its history of magnitudes. Floats
/// are stored as integers with the same bits, so that they are not rounded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleState {
    /// The f32 scale, stored as its bits.
    pub scale: u32,
    /// The largest f32 magnitude of each previous step, stored as its bits, newest first.
    pub history: Vec<u32>,
}

impl DelayedScaling {
    /// Returns the scale rule for a format whose largest value is `max`.
    pub(super) fn rule(&self, max: f32) -> ScaleRule {
        ScaleRule {
            history: self.history,
            numerator: max * 2f32.powi(-self.margin),
            most_recent: self.amax == AmaxAlgorithm::MostRecent,
        }
    }
}

impl ScaleState {
    /// Returns the state before the first step: a scale of 1 and a history of zeros.
    pub(super) fn first(history: usize) -> Self {
        Self {
            scale: 1f32.to_bits(),
            history: vec![0; history],
        }
    }

    /// Checks a saved state for a history of `expected` steps.
    ///
    /// # Errors
    ///
    /// A message with the reason why the state does not fit.
    pub(super) fn check(&self, expected: usize) -> Result<(), String> {
        let saved = self.history.len();
        if saved != expected {
            return Err(format!(
                "its history has {saved} steps, expected {expected}; set history = {saved}"
            ));
        }
        let scale = f32::from_bits(self.scale);
        if !(scale.is_finite() && scale > 0.0) {
            return Err(format!(
                "invalid scale {scale}: expected a finite number above 0"
            ));
        }
        if let Some(bits) = self.history.iter().find(|bits| **bits > i32::MAX as u32) {
            let amax = f32::from_bits(*bits);
            return Err(format!("invalid magnitude {amax}: expected at least 0"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_margin_leaves_binary_orders_of_magnitude() {
        let numerator = |margin| {
            let settings = DelayedScaling {
                margin,
                ..DelayedScaling::default()
            };
            settings.rule(448.0).numerator
        };
        assert_eq!([3, 0, -1].map(numerator), [56.0, 448.0, 896.0]);
    }

    #[test]
    fn a_state_that_does_not_fit_is_refused() {
        let with = |scale: f32, amaxes: &[f32]| ScaleState {
            scale: scale.to_bits(),
            history: amaxes.iter().map(|amax| amax.to_bits()).collect(),
        };
        let refused = [
            (with(1.0, &[1.0]), "1 steps"),
            (with(0.0, &[1.0, 1.0]), "invalid scale 0"),
            (with(-2.0, &[1.0, 1.0]), "invalid scale -2"),
            (with(f32::NAN, &[1.0, 1.0]), "invalid scale NaN"),
            (with(1.0, &[1.0, -1.0]), "invalid magnitude -1"),
        ];
        for (state, reason) in refused {
            let error = state.check(2).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        assert_eq!(with(1.0, &[f32::NAN, f32::INFINITY]).check(2), Ok(()));
    }
}
