//! How rotary frequencies are stretched, as recipes write it.

use burn_megatron::kernels::rope::Scaling;
use serde::{Deserialize, Serialize};

/// Stretches rotary frequencies, so that a model serves longer sequences than it was trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum RotaryScaling {
    /// The frequencies of the base alone.
    #[default]
    None,
    /// Llama 3.1's: low frequencies are divided, high ones kept, those between interpolated.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f64,
        /// Wavelengths above `original / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original / high` are high ones.
        high: f64,
        /// The context that the model was first trained on.
        original: usize,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071).
    Yarn {
        /// How many times longer the context becomes.
        factor: f64,
        /// The context that the model was first trained on.
        original: usize,
        /// Turns over the original context above which a frequency is kept.
        beta_fast: f64,
        /// Turns below which it is divided by the factor.
        beta_slow: f64,
        /// Scale of the angles' amplitude.
        mscale: f64,
        /// What that is divided by.
        mscale_all_dim: f64,
    },
}

impl From<RotaryScaling> for Scaling {
    fn from(scaling: RotaryScaling) -> Self {
        match scaling {
            RotaryScaling::None => Self::None,
            RotaryScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => Self::Llama3 {
                factor,
                low,
                high,
                original,
            },
            RotaryScaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                mscale,
                mscale_all_dim,
            } => Self::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                mscale,
                mscale_all_dim,
            },
        }
    }
}
