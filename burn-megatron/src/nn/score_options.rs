//! Options of attention scores: the visible keys, the scale and the soft cap.

use burn_megatron_kernels::attention::{AttentionOptions, KeyRanges, Window};

/// Options of attention scores: the visible keys, the scale and the soft cap.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScoreOptions {
    /// The sliding window. With `None` a query attends to all earlier tokens.
    pub window: Option<Window>,
    /// The scale of the scores. `None` uses `1 / sqrt(width)`.
    pub scale: Option<f64>,
    /// The soft cap `c`: a scaled score `s` is replaced by `c tanh(s / c)`.
    pub soft_cap: Option<f64>,
}

impl ScoreOptions {
    /// Returns the options of attention to all earlier tokens in the window.
    pub fn causal(&self) -> AttentionOptions {
        AttentionOptions {
            causal: true,
            window: self.window,
            ..self.without_keys()
        }
    }

    /// Returns the options of attention to these key ranges.
    pub fn of_ranges(&self, ranges: KeyRanges) -> AttentionOptions {
        AttentionOptions {
            ranges: Some(ranges),
            ..self.without_keys()
        }
    }

    fn without_keys(&self) -> AttentionOptions {
        AttentionOptions {
            scale: self.scale,
            soft_cap: self.soft_cap,
            ..AttentionOptions::default()
        }
    }
}
