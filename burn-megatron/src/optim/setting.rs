//! The checks of optimizer settings.

use super::error::OptimizerError;

/// A setting with its name, its value and the check of the value.
pub(super) struct Setting {
    name: &'static str,
    value: f64,
    is_valid: bool,
    fits: &'static str,
}

impl Setting {
    pub fn new(name: &'static str, value: f64, is_valid: bool, fits: &'static str) -> Self {
        Self {
            name,
            value,
            is_valid,
            fits,
        }
    }
}

/// Creates the check for the decay factor of a moving average. The value is rounded to f32 before the check, because
/// the optimizer uses the rounded value.
pub(super) fn beta(name: &'static str, value: f64) -> Setting {
    let is_valid = value >= 0.0 && (value as f32) < 1.0;
    Setting::new(name, value, is_valid, "at least 0 and below 1")
}

pub(super) fn above_zero(name: &'static str, value: f64) -> Setting {
    let is_valid = (value as f32) > 0.0 && (value as f32).is_finite();
    Setting::new(name, value, is_valid, "above 0 and finite")
}

pub(super) fn factor(name: &'static str, value: f64) -> Setting {
    let is_valid = value >= 0.0 && (value as f32).is_finite();
    Setting::new(name, value, is_valid, "at least 0 and finite")
}

/// Returns an error for the first invalid setting.
pub(super) fn check(settings: Vec<Setting>) -> Result<(), OptimizerError> {
    match settings.into_iter().find(|setting| !setting.is_valid) {
        Some(Setting {
            name, value, fits, ..
        }) => Err(OptimizerError::Setting { name, value, fits }),
        None => Ok(()),
    }
}
