//! The frequencies of rotary position embedding, and the table of their cosines and sines.

use std::f64::consts::PI;
use std::ops::Range;

use burn::tensor::{DType, Device, Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::check::NAME;
use crate::KernelError;
use crate::cpu::wide;
use crate::error::check_size;
use crate::record;

/// The scaling of the rotary frequencies. It extends a model to sequences that are longer than its training sequences.
/// Without scaling, pair `i` has the frequency `base^(-2i / width)`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Scaling {
    /// Unscaled frequencies.
    #[default]
    None,
    /// The scaling of Llama 3.1. The scaling of a frequency depends on its wavelength `w = 2 pi / frequency`:
    ///
    /// - Frequencies with `w` above `original / low` are divided by `factor`.
    /// - Frequencies with `w` below `original / high` do not change.
    /// - Frequencies in between are multiplied by `(1 - s) / factor + s`, where
    ///   `s = (original / w - low) / (high - low)`.
    Llama3 {
        /// The context extension factor. It must be at least 1.
        factor: f64,
        /// The limit for low frequencies, in rotations per original context. A frequency with fewer rotations is
        /// divided by `factor`.
        low: f64,
        /// The limit for high frequencies, in rotations per original context. A frequency with more rotations does not
        /// change. It must be larger than `low`.
        high: f64,
        /// The length of the original context in tokens.
        original: usize,
    },
    /// YaRN scaling (Peng et al. 2023, arXiv:2309.00071), as implemented in DeepSeek and Megatron-LM.
    ///
    /// The pair that makes `r` full rotations within the original context has the index
    /// `d(r) = width ln(original / (2 pi r)) / (2 ln base)`. The frequencies of pairs up to `floor d(beta_fast)` do not
    /// change. The frequencies of pairs from `ceil d(beta_slow)` on are divided by `factor`. Between these two indices,
    /// the scaling is interpolated linearly. If `truncate` is false, the two indices are not rounded.
    ///
    /// Cosines and sines are multiplied by `attention_factor`. Its default is `m(mscale) / m(mscale_all_dim)` with
    /// `m(s) = 0.1 s ln factor + 1`.
    Yarn {
        /// The context extension factor. It must be at least 1.
        factor: f64,
        /// The length of the original context in tokens.
        original: usize,
        /// Frequencies with at least this number of full rotations within the original context do not change. It must
        /// be larger than `beta_slow`. It is usually 32.
        beta_fast: f64,
        /// Frequencies with at most this number of full rotations within the original context are divided by `factor`.
        /// It is usually 1.
        beta_slow: f64,
        /// The value `s` of `m(s) = 0.1 s ln factor + 1` in the numerator of the default `attention_factor`. It is
        /// usually 1.
        mscale: f64,
        /// The value `s` of `m(s) = 0.1 s ln factor + 1` in the denominator of the default `attention_factor`. If it is
        /// 0, the denominator is 1. Multi-head latent attention multiplies its scores by the square of the denominator.
        mscale_all_dim: f64,
        /// Whether the two pair indices between which the scaling is interpolated are rounded to integers. It is false
        /// in gpt-oss.
        #[serde(default = "rounded")]
        truncate: bool,
        /// The factor that multiplies cosines and sines. The default is computed from `factor`, `mscale` and
        /// `mscale_all_dim`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
    },
    /// Position interpolation (Chen et al. 2023, arXiv:2306.15595), as in Gemma 3. All frequencies are divided by
    /// `factor`.
    Linear {
        /// The context extension factor. It must be at least 1.
        factor: f64,
    },
    /// LongRoPE (Ding et al. 2024, arXiv:2402.13753), as in Phi-3. The frequency of each pair is divided by its own
    /// factor.
    ///
    /// The length of a sequence determines the factors: `short_factor` for sequences of up to `original` tokens, and
    /// `long_factor` for longer sequences. The table has rows for both cases, see [`RopeTable::first_row`]. The
    /// sequence is a row of a batch, or a document without its padding. In text generation, it is the prompt with the
    /// text generated so far. If this text becomes longer than `original`, all of its tokens are processed again.
    #[serde(rename = "longrope")]
    LongRope {
        /// The factors that divide the frequencies of the `width / 2` pairs in sequences of up to `original` tokens.
        short_factor: Vec<f64>,
        /// The factors that divide the frequencies of the `width / 2` pairs in sequences of more than `original`
        /// tokens.
        long_factor: Vec<f64>,
        /// The length of the original context in tokens.
        original: usize,
        /// The factor that multiplies cosines and sines, for sequences of any length.
        attention_factor: f64,
    },
    /// Dynamic NTK scaling of the `transformers` library. For sequences within the original context, it does not change
    /// the frequencies. Sequences that are longer than the original context are not supported.
    Dynamic {
        /// The factor for sequences that are longer than the original context.
        factor: f64,
        /// The length of the original context in tokens.
        original: usize,
    },
}

fn rounded() -> bool {
    true
}

/// The configuration of a [`RopeTable`].
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The number of rotated features per head. It must be even.
    pub width: usize,
    /// The number of positions in the table.
    pub max_positions: usize,
    /// The base of the frequencies (10,000 in the paper). It must be larger than 1.
    pub base: f64,
    /// The scaling of the frequencies.
    pub scaling: Scaling,
}

const POSITIVE: &str = "a number above 0 and finite in f32";

const FACTORS: &str = "numbers above 0 and finite in f32";

/// Returns whether a factor is positive and finite, also when it is rounded to f32.
fn is_positive(factor: f64) -> bool {
    let factor = factor as f32;
    factor.is_finite() && factor > 0.0
}

fn option(name: &'static str, value: impl ToString, fits: &'static str) -> KernelError {
    KernelError::option(NAME, name, value, fits)
}

impl RopeConfig {
    fn check(&self) -> Result<(), KernelError> {
        let is_finite =
            |name, value: f64, least: f64, fits| match value.is_finite() && value >= least {
                true => Ok(()),
                false => Err(option(name, value, fits)),
            };
        let at_least_one =
            |name, value| is_finite(name, value, 1.0, "a finite number of at least 1");
        let finite = |name, value| is_finite(name, value, 0.0, "a finite number of at least 0");
        let ordered = |(name, less): (_, f64), (other, more): (_, f64), fits| {
            if !(less.is_finite() && less > 0.0) {
                return Err(option(name, less, "a finite number above 0"));
            }
            if !(more.is_finite() && more > less) {
                return Err(option(other, more, fits));
            }
            Ok(())
        };
        if self.width == 0 || !self.width.is_multiple_of(2) {
            return Err(option("width", self.width, "a positive even number"));
        }
        if self.max_positions == 0 {
            return Err(option("max_positions", 0, "a positive number"));
        }
        if !(self.base.is_finite() && self.base > 1.0) {
            return Err(option("base", self.base, "a finite number above 1"));
        }
        check_size(NAME, &[self.rows(), self.width / 2])?;
        match self.scaling {
            Scaling::None => Ok(()),
            Scaling::Linear { factor } => at_least_one("factor", factor),
            Scaling::Dynamic { factor, original } => {
                at_least_one("factor", factor)?;
                at_least_one("original", original as f64)
            }
            Scaling::LongRope {
                ref short_factor,
                ref long_factor,
                original,
                attention_factor,
            } => {
                at_least_one("original", original as f64)?;
                self.check_factors("short_factor", short_factor)?;
                self.check_factors("long_factor", long_factor)?;
                if is_positive(attention_factor) {
                    Ok(())
                } else {
                    Err(option("attention_factor", attention_factor, POSITIVE))
                }
            }
            Scaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                at_least_one("factor", factor)?;
                ordered(("low", low), ("high", high), "a finite number above low")?;
                at_least_one("original", original as f64)
            }
            Scaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                mscale,
                mscale_all_dim,
                truncate: _,
                attention_factor,
            } => {
                at_least_one("factor", factor)?;
                at_least_one("original", original as f64)?;
                let fits = "a finite number above beta_slow";
                ordered(("beta_slow", beta_slow), ("beta_fast", beta_fast), fits)?;
                finite("mscale", mscale)?;
                finite("mscale_all_dim", mscale_all_dim)?;
                match attention_factor {
                    Some(factor) if !(factor.is_finite() && factor > 0.0) => Err(option(
                        "attention_factor",
                        factor,
                        "a finite number above 0",
                    )),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Checks that there is a factor for each pair, and that the frequencies stay finite.
    fn check_factors(&self, name: &'static str, factors: &[f64]) -> Result<(), KernelError> {
        if factors.len() != self.width / 2 {
            let found = format!("{} factors for {} features", factors.len(), self.width);
            return Err(option(name, found, "one factor for each pair of features"));
        }
        match factors.iter().find(|factor| !is_positive(**factor)) {
            Some(factor) => Err(option(name, format!("a list with {factor}"), FACTORS)),
            None => Ok(()),
        }
    }

    /// Returns the number of rows of the table. There is one row per position. With [`Scaling::LongRope`], if
    /// `max_positions` exceeds the original context, additional rows for short sequences follow.
    pub fn rows(&self) -> usize {
        self.max_positions + self.short_rows()
    }

    /// Returns the number of additional rows for short sequences.
    fn short_rows(&self) -> usize {
        match self.scaling {
            Scaling::LongRope { original, .. } if self.max_positions > original => original,
            _ => 0,
        }
    }

    /// Returns the frequencies of the `width / 2` pairs in f64, in radians per position. With [`Scaling::LongRope`],
    /// they are the frequencies for a sequence of [`max_positions`](Self::max_positions) tokens.
    ///
    /// # Errors
    ///
    /// Returns an error if the width is odd, if there are no positions, or if the base or the scaling is invalid.
    pub fn frequencies(&self) -> Result<Vec<f64>, KernelError> {
        self.check()?;
        Ok(self.frequencies_of(self.max_positions))
    }

    /// Returns the frequencies for a sequence of `length` tokens.
    fn frequencies_of(&self, length: usize) -> Vec<f64> {
        let plain = |i: usize| self.base.powf(-2.0 * i as f64 / self.width as f64);
        let scaled = |i: usize| match self.scaling {
            Scaling::None | Scaling::Dynamic { .. } => plain(i),
            Scaling::Linear { factor } => plain(i) / factor,
            Scaling::LongRope {
                ref short_factor,
                ref long_factor,
                original,
                ..
            } => {
                plain(i)
                    / if length > original {
                        long_factor
                    } else {
                        short_factor
                    }[i]
            }
            Scaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                let rotate_instances = original as f64 * plain(i) / (2.0 * PI);
                let kept = ((rotate_instances - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) * ((1.0 - kept) / factor + kept)
            }
            Scaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let kept = 1.0 - self.ramp(i, original, [beta_fast, beta_slow], truncate);
                plain(i) * ((1.0 - kept) / factor + kept)
            }
        };
        (0..self.width / 2).map(scaled).collect()
    }

    /// Returns the position of a pair in the transition between unscaled and scaled frequencies. The position is 0 up
    /// to the pair with `fast` full rotations, and 1 from the pair with `slow` full rotations on.
    fn ramp(&self, pair: usize, original: usize, [fast, slow]: [f64; 2], truncate: bool) -> f64 {
        let width = self.width as f64;
        let rotated_units = |rotate_instances: f64| {
            width * (original as f64 / (2.0 * PI * rotate_instances)).ln() / (2.0 * self.base.ln())
        };
        let (mut from, mut to) = (rotated_units(fast), rotated_units(slow));
        if truncate {
            (from, to) = (from.floor(), to.ceil());
        }
        let (from, to) = (from.max(0.0), to.min(width - 1.0));
        // If both ends are equal, the transition is a step. The published models use this small distance.
        let to = if to == from { from + 0.001 } else { to };
        ((pair as f64 - from) / (to - from)).clamp(0.0, 1.0)
    }

    /// Returns the factor that multiplies cosines and sines. It is 1 for all scalings except YaRN and LongRoPE.
    pub fn concentration(&self) -> f64 {
        match self.scaling {
            Scaling::LongRope {
                attention_factor, ..
            } => attention_factor,
            Scaling::Yarn {
                factor,
                mscale,
                mscale_all_dim,
                attention_factor,
                ..
            } => attention_factor.unwrap_or_else(|| {
                let at = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
                at(mscale) / at(mscale_all_dim)
            }),
            _ => 1.0,
        }
    }
}

/// The table of cosines and sines for all positions. The cosines and the sines are `[rows, width / 2]` each.
///
/// They are computed in f64 and stored in f32 (f64 for f64 tensors). Cloning a table is cheap.
#[derive(Clone, Debug)]
pub struct RopeTable {
    cosine: Tensor<2>,
    sine: Tensor<2>,
    /// The number of rows at the end that are for short sequences only. It is often 0.
    short_rows: usize,
}

impl RopeTable {
    /// Creates the table for tensors of `dtype` on `device`.
    ///
    /// # Errors
    ///
    /// Returns an error if the configuration is invalid (see [`RopeConfig::frequencies`]), if the table has more
    /// elements than a tensor can have, or if `dtype` is not a float type.
    pub fn new(config: &RopeConfig, device: &Device, dtype: DType) -> Result<Self, KernelError> {
        config.check()?;
        if !matches!(
            dtype,
            DType::F64 | DType::F32 | DType::Flex32 | DType::F16 | DType::BF16
        ) {
            return Err(KernelError::Type {
                operation: NAME,
                dtype,
                device: "any device".into(),
                fits: "F64, F32, F16, BF16".into(),
            });
        }
        let shape = [config.rows(), config.width / 2];
        let short_rows = config.short_rows();
        if record::is_recording() {
            let empty = || Tensor::empty(shape, (device, wide(dtype)));
            return Ok(Self {
                cosine: empty(),
                sine: empty(),
                short_rows,
            });
        }
        let scale = config.concentration();
        let (mut cosines, mut sines) = (vec![], vec![]);
        for length in [config.max_positions, short_rows] {
            let frequencies = config.frequencies_of(length);
            for position in 0..length {
                for frequency in &frequencies {
                    let (sine, cosine) = (position as f64 * frequency).sin_cos();
                    cosines.push(scale * cosine);
                    sines.push(scale * sine);
                }
            }
        }
        let options = (&device.clone().inner(), wide(dtype));
        let table = |values: Vec<f64>| Tensor::from_data(TensorData::new(values, shape), options);
        Ok(Self {
            cosine: table(cosines),
            sine: table(sines),
            short_rows,
        })
    }

    /// Returns the number of positions.
    pub fn max_positions(&self) -> usize {
        self.rows() - self.short_rows
    }

    /// Returns the number of rows of the table. See [`RopeConfig::rows`].
    pub fn rows(&self) -> usize {
        self.cosine.dims()[0]
    }

    /// Returns the rows for short sequences, or `None` if all sequences use the same rows. A sequence is short if its
    /// length is at most the number of the returned rows.
    pub fn short_rows(&self) -> Option<Range<usize>> {
        (self.short_rows > 0).then(|| self.max_positions()..self.rows())
    }

    /// Returns the row of position 0 for a sequence of `length` tokens. Position `i` uses row `first_row + i`.
    pub fn first_row(&self, length: usize) -> usize {
        match self.short_rows() {
            Some(short) if length <= short.len() => short.start,
            _ => 0,
        }
    }

    /// Returns the number of rotated features per head.
    pub fn width(&self) -> usize {
        2 * self.cosine.dims()[1]
    }

    /// Returns the element type of the table: f64 for f64 tensors, f32 for other tensors.
    pub fn dtype(&self) -> DType {
        self.cosine.dtype()
    }

    /// Returns the device of the table.
    pub fn device(&self) -> Device {
        self.cosine.device()
    }

    /// Moves the table to another device.
    pub fn to_device(self, device: &Device) -> Self {
        let device = device.clone().inner();
        Self {
            cosine: self.cosine.to_device(&device),
            sine: self.sine.to_device(&device),
            short_rows: self.short_rows,
        }
    }

    /// Returns the cosines and the sines, `[rows, width / 2]` each.
    pub(crate) fn parts(&self) -> (Tensor<2>, Tensor<2>) {
        (self.cosine.clone(), self.sine.clone())
    }
}
