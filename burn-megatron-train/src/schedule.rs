//! Learning rate schedules.

use std::f64::consts::PI;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The shape of the learning rate decay after the warm-up.
///
/// In the formulas, `r` is the completed fraction of the decay. It is 0 at the first step of the decay, and 1 at the
/// step after its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum LrStyle {
    /// Cosine decay: the learning rate is `min + (peak - min) (1 + cos(pi r)) / 2` (Loshchilov and Hutter, SGDR, 2017).
    #[default]
    Cosine,
    /// Linear decay: the learning rate is `min + (peak - min) (1 - r)`.
    Linear,
    /// Warm-up, stable, decay (WSD): the learning rate is `peak` until `decay_steps` steps before the end, and then
    /// decays to `min` (Hu et al., MiniCPM, 2024).
    Wsd {
        /// The number of steps of the decay, at least 1.
        decay_steps: usize,
        /// The shape of the decay.
        tail: WsdTail,
    },
    /// Inverse square root decay: the learning rate of step `s` is `max(min, peak sqrt(W / (s + 1)))`. `W` is the
    /// number of warm-up steps, or 1 without a warm-up (Vaswani et al., Attention is all you need, 2017).
    InverseSqrt,
    /// Constant: the learning rate is `peak` until the end. `min` must be 0.
    Constant,
}

/// The shape of the decay of [`LrStyle::Wsd`]. The learning rate is `min + (peak - min) f(r)`, where `r` is the
/// completed fraction of the decay. Each variant defines the factor `f(r)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WsdTail {
    /// The factor is `1 - r`.
    #[default]
    Linear,
    /// The factor is `2 * 0.5^r - 1`.
    Exponential,
    /// The factor is `1 - sqrt(r)` (Hägele et al., Scaling laws and compute-optimal training, 2024).
    MinusSqrt,
    /// The factor is `(1 + cos(pi r)) / 2`.
    Cosine,
}

/// The error for an invalid learning rate schedule.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LrScheduleError {
    /// `total_steps` is 0.
    #[error("invalid total_steps 0: expected at least 1")]
    NoSteps,
    /// The peak learning rate is not a positive number.
    #[error("invalid peak learning rate {peak}: expected a finite number greater than 0")]
    Peak {
        /// The peak learning rate.
        peak: f64,
    },
    /// The minimum learning rate is not between 0 and the peak.
    #[error("invalid minimum learning rate {min}: expected 0 to the peak of {peak}")]
    Min {
        /// The minimum learning rate.
        min: f64,
        /// The peak learning rate.
        peak: f64,
    },
    /// The warm-up is longer than the run.
    #[error(
        "a warm-up of {warmup_steps} steps is longer than the run of {total_steps}: expected at most \
         {total_steps}"
    )]
    WarmupTooLong {
        /// The number of warm-up steps.
        warmup_steps: usize,
        /// The number of steps of the run.
        total_steps: usize,
    },
    /// Warm-up and decay together are longer than the run.
    #[error(
        "a warm-up of {warmup_steps} and a decay of {decay_steps} steps are longer than the run of \
         {total_steps}: use {}", fitting_decay(*warmup_steps, *total_steps)
    )]
    DecayTooLong {
        /// The number of warm-up steps.
        warmup_steps: usize,
        /// The number of steps of the decay.
        decay_steps: usize,
        /// The number of steps of the run.
        total_steps: usize,
    },
    /// `decay_steps` is 0.
    #[error("invalid decay_steps 0: expected at least 1, or use the style 'constant'")]
    NoDecay,
    /// The decay style is `constant`, but a minimum learning rate is set.
    #[error("invalid minimum learning rate {min} for the style 'constant': expected 0")]
    ConstantWithMin {
        /// The minimum learning rate.
        min: f64,
    },
}

fn fitting_decay(warmup_steps: usize, total_steps: usize) -> String {
    match total_steps.saturating_sub(warmup_steps) {
        0 => format!("a warm-up of less than {total_steps}, to leave steps for the decay"),
        most => format!("a decay of at most {most}"),
    }
}

/// A learning rate schedule: a linear warm-up, followed by the decay of an [`LrStyle`].
///
/// In a run of `T` steps with `W` warm-up steps, step `s` (counted from 0) has the following learning rate:
///
/// - For `s < W`: `peak (s + 1) / W`. The learning rate of the first update is `peak / W`, not 0. The learning rate of
///   the last update of the warm-up is `peak`.
/// - For `W <= s < T`: the decay of the style with `r = (s - W) / (T - W)`. The learning rate of the first update after
///   the warm-up is `peak`. The last update of the run is one step before the learning rate would reach `min`. With
///   [`LrStyle::Wsd`] and a decay of `D` steps, the learning rate is `peak` before the decay, and the decay uses
///   `r = (s - (T - D)) / D`. [`LrStyle::InverseSqrt`] has its own formula, starts slightly below `peak`, and does not
///   end at `min`.
/// - For `s >= T`: `min`, or `peak` for [`LrStyle::Constant`].
///
/// After the warm-up, the learning rate never increases and never falls below `min`. During the warm-up it may be below
/// `min`.
///
/// In a recipe:
///
/// ```toml
/// peak = 3e-4
/// min = 3e-5            # default 0
/// warmup_steps = 20     # default 0
/// total_steps = 200
/// style = "cosine"      # default; or "linear", "inverse_sqrt", "constant", or
/// # style = { wsd = { decay_steps = 40, tail = "minus_sqrt" } }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedLrSchedule")]
pub struct LrSchedule {
    peak: f64,
    min: f64,
    warmup_steps: usize,
    total_steps: usize,
    style: LrStyle,
}

/// The settings of a schedule, before they are checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UncheckedLrSchedule {
    peak: f64,
    #[serde(default)]
    min: f64,
    #[serde(default)]
    warmup_steps: usize,
    total_steps: usize,
    #[serde(default)]
    style: LrStyle,
}

impl TryFrom<UncheckedLrSchedule> for LrSchedule {
    type Error = LrScheduleError;

    fn try_from(settings: UncheckedLrSchedule) -> Result<Self, LrScheduleError> {
        let UncheckedLrSchedule {
            peak,
            min,
            warmup_steps,
            total_steps,
            style,
        } = settings;
        Self::new(peak, min, warmup_steps, total_steps, style)
    }
}

impl LrSchedule {
    /// Creates a learning rate schedule for a run of `total_steps` updates.
    ///
    /// # Errors
    ///
    /// [`LrScheduleError`] if the settings are inconsistent.
    pub fn new(
        peak: f64,
        min: f64,
        warmup_steps: usize,
        total_steps: usize,
        style: LrStyle,
    ) -> Result<Self, LrScheduleError> {
        if total_steps == 0 {
            return Err(LrScheduleError::NoSteps);
        }
        if !(peak.is_finite() && peak > 0.0) {
            return Err(LrScheduleError::Peak { peak });
        }
        if !(0.0..=peak).contains(&min) {
            return Err(LrScheduleError::Min { min, peak });
        }
        if warmup_steps > total_steps {
            return Err(LrScheduleError::WarmupTooLong {
                warmup_steps,
                total_steps,
            });
        }
        match style {
            LrStyle::Constant if min != 0.0 => Err(LrScheduleError::ConstantWithMin { min }),
            LrStyle::Wsd { decay_steps: 0, .. } => Err(LrScheduleError::NoDecay),
            LrStyle::Wsd { decay_steps, .. } if decay_steps > total_steps - warmup_steps => {
                Err(LrScheduleError::DecayTooLong {
                    warmup_steps,
                    decay_steps,
                    total_steps,
                })
            }
            _ => Ok(Self {
                peak,
                min,
                warmup_steps,
                total_steps,
                style,
            }),
        }
    }

    /// Returns the learning rate of update `step`, counted from 0.
    ///
    /// ```
    /// use burn_megatron_train::schedule::{LrSchedule, LrStyle};
    ///
    /// // 2 steps of warm-up, then a linear decay from 1 to 0.2 in 8 steps.
    /// let schedule = LrSchedule::new(1.0, 0.2, 2, 10, LrStyle::Linear)?;
    /// assert_eq!([schedule.lr(0), schedule.lr(1), schedule.lr(2)], [0.5, 1.0, 1.0]);
    /// assert!((schedule.lr(6) - 0.6).abs() < 1e-12);
    /// assert!(LrSchedule::new(1.0, 0.2, 20, 10, LrStyle::Linear).is_err());
    /// # Ok::<(), burn_megatron_train::schedule::LrScheduleError>(())
    /// ```
    pub fn lr(&self, step: usize) -> f64 {
        if step < self.warmup_steps {
            return self.peak * ((step + 1) as f64 / self.warmup_steps as f64);
        }
        let factor = match self.style {
            LrStyle::Constant => 1.0,
            _ if step >= self.total_steps => 0.0,
            LrStyle::InverseSqrt => {
                let warmup = self.warmup_steps.max(1) as f64;
                let rate = self.peak * (warmup / (step + 1) as f64).sqrt();
                return rate.clamp(self.min, self.peak);
            }
            LrStyle::Cosine => half_cosine(self.progress(step, self.warmup_steps)),
            LrStyle::Linear => 1.0 - self.progress(step, self.warmup_steps),
            LrStyle::Wsd { decay_steps, tail } => {
                let first = self.total_steps - decay_steps;
                if step < first {
                    1.0
                } else {
                    tail.factor(self.progress(step, first))
                }
            }
        };
        // Exact at both ends; the clamp keeps rounding within them.
        (self.min * (1.0 - factor) + self.peak * factor).clamp(self.min, self.peak)
    }

    /// Returns the total number of updates of the run.
    pub fn total_steps(&self) -> usize {
        self.total_steps
    }

    /// Returns the peak learning rate.
    pub fn peak(&self) -> f64 {
        self.peak
    }

    /// Returns the progress of `step` from step `first` to the end of the run, in `0..1`.
    fn progress(&self, step: usize, first: usize) -> f64 {
        (step - first) as f64 / (self.total_steps - first) as f64
    }
}

impl WsdTail {
    fn factor(self, r: f64) -> f64 {
        match self {
            WsdTail::Linear => 1.0 - r,
            WsdTail::Exponential => 2.0 * 0.5_f64.powf(r) - 1.0,
            WsdTail::MinusSqrt => 1.0 - r.sqrt(),
            WsdTail::Cosine => half_cosine(r),
        }
    }
}

/// Returns half a period of the cosine, from 1 at `r = 0` to 0 at `r = 1`.
fn half_cosine(r: f64) -> f64 {
    0.5 * (1.0 + (PI * r).cos())
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
