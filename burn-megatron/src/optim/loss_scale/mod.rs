//! Loss scaling: the loss is multiplied by a factor, so that f16 gradients do not underflow to 0.
//!
//! The smallest positive f16 number is 2^-24, and many gradients of a large model are smaller. If the loss is
//! multiplied by a scale `s`, every gradient is also multiplied by `s`. The f32 sums of the gradients are divided by
//! `s` before the gradient norm, clipping and the optimizer step (Micikevicius et al. 2018, arXiv:1710.03740, section
//! 3.2). If `s` is a power of two, the multiplication and the division do not round. The range of bf16 and f32 reaches
//! down to 2^-126, so they do not need a loss scale.

use serde::{Deserialize, Serialize};

mod config;
mod f64_as_text;
#[cfg(test)]
mod tests;

pub use config::{LossScale, LossScaleConfig, LossScaleError};

/// The largest scale: its inverse is the smallest normal f32.
const MAX_SCALE: f64 = (1u128 << 126) as f64;

/// The smallest scale, whose inverse is also an f32.
const MIN_SCALE: f64 = 1.0 / MAX_SCALE;

/// The effect of a step on the loss scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleChange {
    /// The scale is unchanged. This includes steps with an overflow that the hysteresis tolerates, and all steps if the
    /// scale is not dynamic.
    Unchanged,
    /// The scale was increased for the next step.
    Grown,
    /// The scale was reduced for the next step.
    BackedOff,
    /// The scale could not be reduced, because it is already [`LossScaleConfig::min`].
    AtMinimum,
}

/// The state of a dynamic loss scale, which is saved in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScalerState {
    /// The loss scale of the next step. It is saved as text, because some JSON parsers do not preserve the bits of a
    /// number.
    #[serde(with = "f64_as_text")]
    pub scale: f64,
    /// The number of steps without an overflow since the last overflow or growth.
    pub good_steps: u32,
    /// The number of overflows since the scale last grew. When the number has reached [`LossScaleConfig::hysteresis`],
    /// each overflow reduces the scale.
    pub overflows: u32,
}

/// The loss scale of a run: constant or dynamic.
///
/// A dynamic scale grows after a complete interval of steps without an overflow, and is reduced after an overflow.
/// Because of the hysteresis, the first overflows do not reduce the scale. A single bad batch then causes a skipped
/// step, but does not change the scale. As in Megatron-LM, only a complete interval resets the hysteresis.
///
/// ```text
/// overflow     good_steps = 0,  overflows += 1
///              overflows >= hysteresis:       scale = max(scale backoff, min)
/// otherwise    good_steps += 1
///              good_steps >= growth_interval: scale = min(scale growth, 2^126)
///                                             good_steps = 0,  overflows = 0
/// ```
///
/// The scaler does not communicate. All ranks must record the same overflows, so that they have the same scale.
///
/// ```
/// use burn_megatron::optim::{LossScale, LossScaleConfig, LossScaler, ScaleChange};
///
/// let config = LossScaleConfig {
///     initial: 1024.0,
///     growth_interval: 2,
///     hysteresis: 1,
///     ..LossScaleConfig::default()
/// };
/// let mut scaler = LossScaler::new(&LossScale::Dynamic(config))?;
/// assert_eq!(scaler.update(true), ScaleChange::BackedOff);
/// assert_eq!(scaler.scale(), 512.0);
/// assert_eq!(scaler.update(false), ScaleChange::Unchanged);
/// assert_eq!(scaler.update(false), ScaleChange::Grown);
/// assert_eq!(scaler.scale(), 1024.0);
/// # Ok::<(), burn_megatron::optim::LossScaleError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LossScaler {
    setting: LossScale,
    state: LossScalerState,
}

impl LossScaler {
    /// Creates a loss scaler with the initial scale.
    ///
    /// # Errors
    ///
    /// [`LossScaleError::Setting`] if a setting is out of its range.
    pub fn new(setting: &LossScale) -> Result<Self, LossScaleError> {
        setting.check()?;
        let scale = match setting {
            LossScale::None => 1.0,
            LossScale::Constant(scale) => *scale,
            LossScale::Dynamic(config) => config.initial,
        };
        Ok(Self {
            setting: *setting,
            state: LossScalerState {
                scale,
                good_steps: 0,
                overflows: 0,
            },
        })
    }

    /// Returns the scale of the next step. The loss is multiplied by the scale, and the gradients are divided by the
    /// scale.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Records a step. `overflow` is true if a gradient was not finite on at least one rank. The value must be the same
    /// on all ranks.
    ///
    /// If `overflow` is true, the caller must skip the step, regardless of the returned value.
    pub fn update(&mut self, overflow: bool) -> ScaleChange {
        match (&self.setting, overflow) {
            (LossScale::Dynamic(config), true) => self.state.record_overflow(config),
            (LossScale::Dynamic(config), false) => self.state.record_good_step(config),
            (LossScale::None | LossScale::Constant(_), _) => ScaleChange::Unchanged,
        }
    }

    /// Returns the state for a checkpoint, or `None` if the scale is not dynamic.
    pub fn state(&self) -> Option<LossScalerState> {
        matches!(self.setting, LossScale::Dynamic(_)).then_some(self.state)
    }

    /// Restores the state of a checkpoint. The settings of this run still apply. If the saved number of good steps has
    /// already reached the growth interval of this run, the scale grows at the next step without an overflow.
    ///
    /// # Errors
    ///
    /// [`LossScaleError::Saved`] if the saved scale is out of the range of this run, and [`LossScaleError::NotDynamic`]
    /// if the scale of this run is not dynamic. After an error the scaler is unchanged.
    pub fn restore(&mut self, state: LossScalerState) -> Result<(), LossScaleError> {
        let LossScale::Dynamic(config) = &self.setting else {
            return Err(LossScaleError::NotDynamic { scale: state.scale });
        };
        if !(config.min..=MAX_SCALE).contains(&state.scale) {
            return Err(LossScaleError::Saved {
                scale: state.scale,
                min: config.min,
            });
        }
        self.state = state;
        Ok(())
    }
}

impl LossScalerState {
    fn record_overflow(&mut self, config: &LossScaleConfig) -> ScaleChange {
        self.good_steps = 0;
        self.overflows = self.overflows.saturating_add(1);
        if self.overflows < config.hysteresis {
            return ScaleChange::Unchanged;
        }
        if self.scale == config.min {
            return ScaleChange::AtMinimum;
        }
        self.scale = (self.scale * config.backoff).max(config.min);
        ScaleChange::BackedOff
    }

    fn record_good_step(&mut self, config: &LossScaleConfig) -> ScaleChange {
        self.good_steps = self.good_steps.saturating_add(1);
        if self.good_steps < config.growth_interval {
            return ScaleChange::Unchanged;
        }
        self.good_steps = 0;
        self.overflows = 0;
        if self.scale == MAX_SCALE {
            return ScaleChange::Unchanged;
        }
        self.scale = (self.scale * config.growth).min(MAX_SCALE);
        ScaleChange::Grown
    }
}
