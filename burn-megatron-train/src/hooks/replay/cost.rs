//! Measures the time that the replay checks of a run take.

use std::fmt;
use std::time::Instant;

/// The wall time of the replay checks on a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReplayCost {
    /// The time of the forward pass, backward pass and gradient reduction of the steps that were computed twice.
    pub checked: MeanTime,
    /// The time of the forward pass, backward pass and gradient reduction of the other steps.
    pub plain: MeanTime,
    /// The time to compare the weights and the optimizer state in each step.
    pub state: MeanTime,
}

/// The number and the sum of time measurements, from which the mean is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MeanTime {
    /// The number of measurements.
    pub count: usize,
    /// The sum of the measurements, in seconds.
    pub seconds: f64,
}

impl MeanTime {
    pub(super) fn add(&mut self, began: Instant) {
        self.count += 1;
        self.seconds += began.elapsed().as_secs_f64();
    }

    /// Returns the mean time in seconds. It is 0 if there are no measurements.
    pub fn mean(self) -> f64 {
        self.seconds / self.count.max(1) as f64
    }
}

impl fmt::Display for ReplayCost {
    /// `5 steps computed twice, 0.310 s each where others take 0.080 s; ...`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            checked,
            plain,
            state,
        } = self;
        let (count, mean) = (checked.count, checked.mean());
        let word = if count == 1 { "step" } else { "steps" };
        write!(f, "{count} {word} computed twice")?;
        if count > 0 {
            write!(f, ", {mean:.3} s each")?;
        }
        if count > 0 && plain.count > 0 {
            write!(f, " where others take {:.3} s", plain.mean())?;
        }
        let mean = state.mean();
        write!(
            f,
            "; weights and optimizer state compared, {mean:.3} s per step"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_a_check_is_said_beside_the_time_of_a_step() {
        let time = |count, seconds| MeanTime { count, seconds };
        let cost = |checked, plain| ReplayCost {
            checked,
            plain,
            state: time(4, 0.02),
        };
        let state = "weights and optimizer state compared, 0.005 s per step";
        for (cost, text) in [
            (
                cost(time(2, 1.0), time(4, 0.5)),
                "2 steps computed twice, 0.500 s each where others take 0.125 s; ",
            ),
            (
                cost(time(1, 1.0), time(0, 0.0)),
                "1 step computed twice, 1.000 s each; ",
            ),
            (cost(time(0, 0.0), time(4, 0.5)), "0 steps computed twice; "),
        ] {
            assert_eq!(cost.to_string(), format!("{text}{state}"));
        }
    }
}
