//! Settings that differ between the layers of a transformer, and settings of a few families.

use burn_megatron::kernels::rope::{RopeConfig, Scaling};
use burn_megatron::nn::{BuildError, QkNorm, QkNormConfig, unfused_reason};

use super::{MAX_SIZE, Positions, TransformerConfig, refused};

impl TransformerConfig {
    /// Returns the sliding window of layer `number`, or `None` if the layer attends to all previous tokens.
    pub fn window_of(&self, number: usize) -> Option<usize> {
        match &self.layer_windows[..] {
            [] => self.window,
            pattern => Some(pattern[number % pattern.len()]).filter(|window| *window > 0),
        }
    }

    /// Returns the sliding windows of all layers.
    pub(crate) fn windows(&self) -> Vec<Option<usize>> {
        (0..self.layers)
            .map(|number| self.window_of(number))
            .collect()
    }

    pub(crate) fn qk_norm(&self) -> Option<QkNormConfig> {
        let norm = |kind| {
            QkNormConfig::new(kind, self.norm_epsilon)
                .with_zero_centered(self.qk_norm_zero_centered)
        };
        self.qk_norm.map(norm)
    }

    /// Returns the widths of the query norm and the key norm, if the model has them.
    pub(crate) fn qk_norm_widths(&self) -> Option<[usize; 2]> {
        let width = self.width_of_heads();
        Some(match self.qk_norm? {
            QkNorm::Heads => [width; 2],
            QkNorm::Whole => [self.heads * width, self.groups() * width],
        })
    }

    /// Returns the reason why attention cannot be fused, if any.
    pub(crate) fn unfused_attention(&self) -> Option<String> {
        let width = self.width_of_heads();
        unfused_reason(self.attention_dropout, width, self.attention_soft_cap)
    }

    /// Returns the RoPE configuration of layers with a sliding window, if it differs from the configuration of the
    /// other layers.
    pub(crate) fn local_rope(&self, head_width: usize) -> Option<RopeConfig> {
        let rope = self.rope(head_width)?;
        Some(RopeConfig {
            base: self.local_base?,
            scaling: Scaling::None,
            ..rope
        })
    }

    /// Checks the settings that differ between layers.
    pub(crate) fn check_layers(&self) -> Result<(), BuildError> {
        let windows = self.layer_windows.len();
        if windows > self.layers {
            return Err(refused(format!(
                "{windows} layer_windows for {} layers: expected at most one for each, with 0 for a layer without a \
                 window; a shorter list is repeated",
                self.layers
            )));
        }
        if let Some(window) = self.layer_windows.iter().find(|window| **window > MAX_SIZE) {
            return Err(refused(format!(
                "invalid layer_windows with {window}: expected at most {MAX_SIZE}"
            )));
        }
        if windows > 0 && self.window.is_some() {
            return Err(refused(
                "window conflicts with layer_windows: remove one of them".into(),
            ));
        }
        let is_rotary = matches!(self.positions, Positions::Rotary { .. });
        if let Some(base) = self.local_base {
            if !(base.is_finite() && base > 1.0) {
                return Err(refused(format!(
                    "invalid local_base = {base}: expected a finite number above 1"
                )));
            }
            if !is_rotary {
                return Err(refused(
                    "local_base requires rotary positions, but the model has learned positions: remove \
                     local_base".into(),
                ));
            }
        }
        for (name, value) in [
            ("attention_scale", self.attention_scale),
            ("attention_soft_cap", self.attention_soft_cap),
            ("logit_soft_cap", self.logit_soft_cap),
        ] {
            let fits = |value: f64| value > 0.0 && (value as f32).is_finite() && value as f32 > 0.0;
            if let Some(value) = value.filter(|value| !fits(*value)) {
                return Err(refused(format!(
                    "invalid {name} = {value}: expected a number above 0 and finite in f32"
                )));
            }
        }
        if self.qk_norm_zero_centered && self.qk_norm.is_none() {
            return Err(refused(
                "qk_norm_zero_centered requires qk_norm: set qk_norm, or remove qk_norm_zero_centered".into(),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "layers_tests.rs"]
mod tests;
