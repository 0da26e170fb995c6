//! RoPE scaling, as written in recipes.

use burn_megatron::kernels::KernelError;
use burn_megatron::kernels::rope::{RopeConfig, Scaling};
use burn_megatron::nn::BuildError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Positions;

/// Scales rotary frequencies, so that a model supports longer sequences than it was trained on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum RotaryScaling {
    /// No scaling.
    #[default]
    None,
    /// Llama 3.1: low frequencies are divided, high ones kept, those between interpolated.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original / high` are high frequencies.
        high: f64,
        /// The original context length.
        original: usize,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071).
    Yarn {
        /// The ratio of the new to the original context length.
        factor: f64,
        /// The original context length.
        original: usize,
        /// Rotations over the original context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which it is divided by the factor.
        beta_slow: f64,
        /// Scale of the attention amplitude.
        mscale: f64,
        /// Scale that the amplitude is divided by.
        mscale_all_dim: f64,
        /// Whether the range of frequencies that are interpolated is rounded to whole ones; not in gpt-oss.
        #[serde(default = "rounded")]
        truncate: bool,
        /// Factor of cosines and sines. By default it follows from `factor`, `mscale` and `mscale_all_dim`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
    },
    /// All frequencies are divided (Chen et al. 2023, arXiv:2306.15595), as in Gemma 3.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// LongRoPE (Ding et al. 2024, arXiv:2402.13753), as in Phi-3: each frequency is divided by a factor of its pair.
    ///
    /// The length of a sequence chooses the factors: up to `original` tokens the short ones, above it the long ones. A
    /// sequence is a row of a batch, a document without its padding, or in generation the text so far. A text that grows
    /// beyond `original` is read again.
    #[serde(rename = "longrope")]
    LongRope {
        /// The divisor of each pair of features in sequences of up to `original` tokens.
        short_factor: Vec<f64>,
        /// The divisor of each pair of features in longer sequences.
        long_factor: Vec<f64>,
        /// The original context length.
        original: usize,
        /// Factor of cosines and sines, in sequences of any length.
        attention_factor: f64,
    },
    /// Dynamic NTK scaling of `transformers`: no scaling up to the original context, which a sequence must not exceed here.
    Dynamic {
        /// The factor for sequences longer than the original context.
        factor: f64,
        /// The original context length.
        original: usize,
    },
}

fn rounded() -> bool {
    true
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
                truncate,
                attention_factor,
            } => Self::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                mscale,
                mscale_all_dim,
                truncate,
                attention_factor,
            },
            RotaryScaling::Linear { factor } => Self::Linear { factor },
            RotaryScaling::LongRope {
                short_factor,
                long_factor,
                original,
                attention_factor,
            } => Self::LongRope {
                short_factor,
                long_factor,
                original,
                attention_factor,
            },
            RotaryScaling::Dynamic { .. } => Self::None,
        }
    }
}

/// Checks that dynamic scaling, which starts after the original context, has nothing to scale.
pub(crate) fn check_dynamic(positions: &Positions, context: usize) -> Result<(), BuildError> {
    match positions {
        Positions::Rotary {
            scaling: RotaryScaling::Dynamic { original, .. },
            ..
        } if context > *original => Err(BuildError::Config {
            path: "model.positions.rotary.scaling.dynamic".into(),
            message: format!(
                "context = {context} exceeds original = {original}: set model.context to at most {original}, or set \
                 another scaling"
            ),
        }),
        _ => Ok(()),
    }
}

/// Checks the rotary table's settings before ranks build it.
pub(crate) fn check(rope: &RopeConfig) -> Result<(), BuildError> {
    let Err(error) = rope.frequencies() else {
        return Ok(());
    };
    let path = String::from("model.positions.rotary");
    Err(match error {
        KernelError::Option {
            name, value, fits, ..
        } => BuildError::Config {
            path: match (name, &rope.scaling) {
                ("base", _) | (_, Scaling::None) => path,
                (_, Scaling::Llama3 { .. }) => path + ".scaling.llama3",
                (_, Scaling::Yarn { .. }) => path + ".scaling.yarn",
                (_, Scaling::Linear { .. }) => path + ".scaling.linear",
                (_, Scaling::LongRope { .. }) => path + ".scaling.longrope",
            },
            message: format!("invalid {name} = {value}: expected {fits}"),
        },
        error => BuildError::Config {
            path,
            message: error.to_string(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TransformerConfig;

    #[test]
    fn rotary_positions_are_refused_with_their_path() {
        let rotary = |base, scaling| {
            let config = TransformerConfig {
                positions: Positions::Rotary { base, scaling },
                ..TransformerConfig::llama()
            };
            config.check(1, false).unwrap_err().to_string()
        };
        assert_eq!(
            rotary(1.0, RotaryScaling::None),
            "model.positions.rotary: invalid base = 1: expected a finite number above 1"
        );
        let llama3 = |factor, low| RotaryScaling::Llama3 {
            factor,
            low,
            high: 4.0,
            original: 64,
        };
        let path = "model.positions.rotary.scaling.llama3";
        for (scaling, wanted) in [
            (
                llama3(0.5, 1.0),
                "invalid factor = 0.5: expected a finite number of at least 1",
            ),
            (
                llama3(8.0, -1.0),
                "invalid low = -1: expected a finite number above 0",
            ),
            (
                llama3(8.0, 5.0),
                "invalid high = 4: expected a finite number above low",
            ),
        ] {
            assert_eq!(rotary(1e4, scaling), format!("{path}: {wanted}"));
        }
        let yarn = RotaryScaling::Yarn {
            factor: f64::NAN,
            original: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 0.0,
            truncate: true,
            attention_factor: None,
        };
        assert!(
            rotary(1e4, yarn)
                .starts_with("model.positions.rotary.scaling.yarn: invalid factor = NaN")
        );
        let features = TransformerConfig::llama().width_of_heads();
        let long_rope = RotaryScaling::LongRope {
            short_factor: vec![1.0; features / 2],
            long_factor: vec![1.0; features],
            original: 64,
            attention_factor: 1.0,
        };
        assert_eq!(
            rotary(1e4, long_rope),
            format!(
                "model.positions.rotary.scaling.longrope: invalid long_factor = {features} factors for {features} \
                 features: expected one factor for each pair of features"
            )
        );
    }
}
