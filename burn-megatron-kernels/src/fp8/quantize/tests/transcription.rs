//! A scalar transcription of the quantization formulas.

use super::super::scaling::ScalingKind;
use super::super::{CurrentScale, Format};
use crate::fp8::matrix::{mx_words, words};
use crate::fp8::{BLOCK, MX_BLOCK, e8m0};

/// Codes and scales of a copy, as bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    pub codes: Vec<u32>,
    pub scales: Vec<u32>,
}

/// Returns a copy `[rows, depth]` of the values `at(row, column)`, and the number of saturated values.
pub(super) fn copy(
    at: &dyn Fn(usize, usize) -> f32,
    [rows, depth]: [usize; 2],
    format: Format,
    kind: ScalingKind,
    given: f32,
) -> (Copy, u32) {
    let mut beyond = 0;
    let mut codes = vec![0u32; rows * words(depth)];
    let mut put = |row: usize, column: usize, value: f32| {
        beyond += u32::from(value.abs() > format.max());
        let code = u32::from(format.encode(value));
        codes[row * words(depth) + column / 4] |= code << (8 * (column % 4));
    };
    let mut scales = vec![];
    match kind {
        ScalingKind::Tensor => {
            for row in 0..rows {
                (0..depth).for_each(|column| put(row, column, at(row, column) * given));
            }
            scales.push((1.0 / given).to_bits());
        }
        ScalingKind::Blocks {
            square,
            power_of_two,
        } => {
            let height = if square { BLOCK } else { 1 };
            for top in (0..rows).step_by(height) {
                for left in (0..depth).step_by(BLOCK) {
                    let block = || {
                        (top..rows.min(top + height)).flat_map(|row| {
                            (left..depth.min(left + BLOCK)).map(move |column| (row, column))
                        })
                    };
                    let amax = largest(block().map(|(row, column)| at(row, column)));
                    let options = CurrentScale {
                        epsilon: 0.0,
                        power_of_two,
                    };
                    let scale = current(amax, format, options);
                    block().for_each(|(row, column)| put(row, column, at(row, column) * scale));
                    scales.push((1.0 / scale).to_bits());
                }
            }
        }
        ScalingKind::Mx => {
            scales = vec![0u32; rows * mx_words(depth)];
            for row in 0..rows {
                for (block, left) in (0..depth).step_by(MX_BLOCK).enumerate() {
                    let columns = left..depth.min(left + MX_BLOCK);
                    let amax = largest(columns.clone().map(|column| at(row, column)));
                    let code = e8m0::of_amax(amax);
                    scales[row * mx_words(depth) + block / 4] |=
                        u32::from(code) << (8 * (block % 4));
                    columns.for_each(|column| put(row, column, times(at(row, column), code)));
                }
            }
        }
    }
    (Copy { codes, scales }, beyond)
}

/// Returns `value * 2^(127 - code)`, rounded once, or NaN if the code is NaN.
fn times(value: f32, code: u8) -> f32 {
    match code {
        e8m0::NAN => f32::NAN,
        code => (f64::from(value) * 2f64.powi(127 - i32::from(code))) as f32,
    }
}

/// Returns the largest magnitude. The result is NaN if any value is NaN, because NaN has the largest bits.
pub(super) fn largest(values: impl Iterator<Item = f32>) -> f32 {
    let bits = values.map(|value| value.to_bits() & 0x7fff_ffff);
    f32::from_bits(bits.max().unwrap_or(0))
}

/// Returns the scale for the largest magnitude `amax`.
pub(super) fn current(amax: f32, format: Format, options: CurrentScale) -> f32 {
    let amax = if amax < options.epsilon {
        options.epsilon
    } else {
        amax
    };
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    let scale = (format.max() / amax).min(f32::MAX);
    if options.power_of_two {
        f32::from_bits(scale.to_bits() & 0x7f80_0000)
    } else {
        scale
    }
}

/// Returns the dequantized values of a copy.
pub(super) fn values(
    copy: &Copy,
    [rows, depth]: [usize; 2],
    format: Format,
    kind: ScalingKind,
) -> Vec<f32> {
    let value = |row: usize, column: usize| {
        let word = copy.codes[row * words(depth) + column / 4];
        let scale = match kind {
            ScalingKind::Tensor => f32::from_bits(copy.scales[0]),
            ScalingKind::Blocks { square, .. } => {
                let height = if square { BLOCK } else { 1 };
                let at = row / height * depth.div_ceil(BLOCK) + column / BLOCK;
                f32::from_bits(copy.scales[at])
            }
            ScalingKind::Mx => {
                let block = column / MX_BLOCK;
                let word = copy.scales[row * mx_words(depth) + block / 4];
                e8m0::decode((word >> (8 * (block % 4))) as u8)
            }
        };
        format.decode((word >> (8 * (column % 4))) as u8) * scale
    };
    (0..rows * depth)
        .map(|at| value(at / depth, at % depth))
        .collect()
}
