//! A factor on the loss that keeps small gradients from becoming 0 in f16.
//!
//! The smallest positive f16 is 2^-24, and many gradients of a large model lie under it. With the
//! loss times `s`, by the chain rule, every gradient is `s` times as large. The sums of gradients,
//! in f32, are divided by `s` before norm, clipping and the optimizer see them (Micikevicius et al.
//! 2018, arXiv:1710.03740, section 3.2). Where `s` is a power of two, nothing of this rounds. bf16
//! and f32 reach down to 2^-126 and need no scale.

use serde::{Deserialize, Serialize};

mod as_text;
mod setting;
#[cfg(test)]
mod tests;

pub use setting::{LossScale, LossScaleConfig, LossScaleError};

/// The largest scale: its inverse is the smallest f32 that keeps all of its bits.
const LARGEST: f64 = (1u128 << 126) as f64;

/// The smallest scale, so that its inverse is an f32 too.
const SMALLEST: f64 = 1.0 / LARGEST;

/// What a step did to the loss scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleChange {
    /// Nothing. It is the answer to an overflow as well while hysteresis lets it pass, and always
    /// where the scale is not dynamic.
    Kept,
    /// It is larger from the next step on.
    Grown,
    /// It is smaller from the next step on.
    BackedOff,
    /// It should have become smaller, and cannot: it is at [`LossScaleConfig::min`].
    AtMinimum,
}

/// What a dynamic scale remembers from step to step, for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScalerState {
    /// The factor on the loss of the next step. It is saved as text, as not every reader of JSON
    /// gives back the bits of a number.
    #[serde(with = "as_text")]
    pub scale: f64,
    /// Steps without an overflow since the last overflow or growth.
    pub good_steps: u32,
    /// Overflows since the last growth; from [`LossScaleConfig::hysteresis`] of them on, each makes
    /// the scale smaller.
    pub overflows: u32,
}

/// The loss scale of a run: fixed, or found by trying.
///
/// A dynamic scale grows after a whole interval of steps without an overflow, and backs off at an
/// overflow. Hysteresis lets the first overflows pass, so that one bad batch costs a step and not a
/// factor; as in Megatron-LM, only the end of a whole interval restores it.
///
/// ```text
/// overflow     good_steps = 0,  overflows += 1
///              overflows >= hysteresis:       scale = max(scale backoff, min)
/// otherwise    good_steps += 1
///              good_steps >= growth_interval: scale = min(scale growth, 2^126)
///                                             good_steps = 0,  overflows = 0
/// ```
///
/// It is a pure value: ranks that tell it the same have the same scale.
#[derive(Clone, Debug, PartialEq)]
pub struct LossScaler {
    setting: LossScale,
    state: LossScalerState,
}

impl LossScaler {
    /// The scale at the start of a run.
    ///
    /// # Errors
    ///
    /// [`LossScaleError::Setting`] for a setting out of its range.
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

    /// The factor on the loss of the next step, without unit. The gradients of that step are divided
    /// by it.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Ends a step. `overflow` says that some gradient was not finite on some rank, and has to be
    /// the same on all of them.
    ///
    /// A step with an overflow must not be taken, whatever becomes of the scale.
    pub fn update(&mut self, overflow: bool) -> ScaleChange {
        match (&self.setting, overflow) {
            (LossScale::Dynamic(config), true) => self.state.overflowed(config),
            (LossScale::Dynamic(config), false) => self.state.went_well(config),
            (LossScale::None | LossScale::Constant(_), _) => ScaleChange::Kept,
        }
    }

    /// What a checkpoint has to keep; nothing where the scale is not dynamic.
    pub fn state(&self) -> Option<LossScalerState> {
        matches!(self.setting, LossScale::Dynamic(_)).then_some(self.state)
    }

    /// Goes on from a checkpoint, with the settings of this run. An interval that is now shorter
    /// than the good steps so far ends at the next.
    ///
    /// # Errors
    ///
    /// [`LossScaleError::Saved`] for a scale out of the range of this run, and
    /// [`LossScaleError::NotDynamic`] where there is nothing to go on with. The scaler is unchanged
    /// then.
    pub fn restore(&mut self, state: LossScalerState) -> Result<(), LossScaleError> {
        let LossScale::Dynamic(config) = &self.setting else {
            return Err(LossScaleError::NotDynamic { scale: state.scale });
        };
        if !(config.min..=LARGEST).contains(&state.scale) {
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
    fn overflowed(&mut self, config: &LossScaleConfig) -> ScaleChange {
        self.good_steps = 0;
        self.overflows = self.overflows.saturating_add(1);
        if self.overflows < config.hysteresis {
            return ScaleChange::Kept;
        }
        if self.scale == config.min {
            return ScaleChange::AtMinimum;
        }
        self.scale = (self.scale * config.backoff).max(config.min);
        ScaleChange::BackedOff
    }

    fn went_well(&mut self, config: &LossScaleConfig) -> ScaleChange {
        self.good_steps = self.good_steps.saturating_add(1);
        if self.good_steps < config.growth_interval {
            return ScaleChange::Kept;
        }
        self.good_steps = 0;
        self.overflows = 0;
        if self.scale == LARGEST {
            return ScaleChange::Kept;
        }
        self.scale = (self.scale * config.growth).min(LARGEST);
        ScaleChange::Grown
    }
}
