//! Computes one quantized copy of a matrix, one block of rows at a time.

use super::super::super::matrix::words;
use super::super::scaling::ScalingKind;
use super::scale::{current, factors, largest, single};
use crate::cpu::{Element, map_tasks, rows_per_task, vectorized};
use crate::fp8::format::{Format, e8m0};
use crate::fp8::matrix::{BLOCK, MX_BLOCK};
use crate::fp8::quantize::scaling::CurrentScale;

/// The number of rows per tile. The f32 values of a tile stay in the L1 cache.
const TILE_ROWS: usize = 32;

/// The input matrix, and whether it is read transposed.
#[derive(Clone, Copy)]
pub(super) struct MatrixSource<'a, E> {
    /// The values of the matrix, row by row.
    pub values: &'a [E],
    /// The rows and columns of the matrix.
    pub sizes: [usize; 2],
    /// Whether the rows of the copy are the columns of the matrix.
    pub transposed: bool,
}

impl<E: Element> MatrixSource<'_, E> {
    /// Returns the rows and the depth of the copy.
    fn copy_sizes(&self) -> [usize; 2] {
        let [rows, columns] = self.sizes;
        if self.transposed {
            [columns, rows]
        } else {
            [rows, columns]
        }
    }

    /// Loads elements `left..left + width` of the copy's rows `top..top + rows` into `tile`. In `tile`, each row starts
    /// at a multiple of [`BLOCK`].
    #[inline(always)]
    fn load(&self, [top, rows]: [usize; 2], [left, width]: [usize; 2], tile: &mut [f32]) {
        let columns = self.sizes[1];
        if self.transposed {
            for at in 0..width {
                let from = &self.values[(left + at) * columns + top..][..rows];
                for (row, value) in from.iter().enumerate() {
                    tile[row * BLOCK + at] = single(*value);
                }
            }
        } else {
            for (row, to) in tile.chunks_exact_mut(BLOCK).take(rows).enumerate() {
                let from = &self.values[(top + row) * columns + left..][..width];
                let pairs = to.iter_mut().zip(from);
                pairs.for_each(|(to, value)| *to = single(*value));
            }
        }
    }
}

/// Statistics of the values.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RangeStatistics {
    /// The bits of the largest magnitude.
    pub amax: u32,
    /// The number of values beyond the largest value of the format.
    pub beyond: u32,
}

impl RangeStatistics {
    /// Returns the statistics with `amax` as the largest magnitude.
    pub(super) fn with_amax(self, amax: u32) -> Self {
        Self { amax, ..self }
    }

    fn and(self, other: Self) -> Self {
        Self {
            amax: self.amax.max(other.amax),
            beyond: self.beyond + other.beyond,
        }
    }
}

/// A quantized copy, or a block of its rows without the codes.
pub(super) struct QuantizedCopy {
    /// The codes as words, with padded rows.
    pub codes: Vec<u32>,
    /// The scales, row by row: bits of f32, or words of E8M0. Empty if the scale is given.
    pub scales: Vec<u32>,
    /// The statistics of the values.
    pub seen: RangeStatistics,
}

/// The task that computes one quantized copy.
pub(super) struct CopyTask<'a, E> {
    /// The input.
    pub source: MatrixSource<'a, E>,
    /// The method of scaling.
    pub kind: ScalingKind,
    /// The given scale. It is not used if scales are computed.
    pub given: f32,
}

impl<E: Element> CopyTask<'_, E> {
    /// Computes the copy.
    #[inline(always)]
    pub(super) fn make(&self, format: Format) -> QuantizedCopy {
        let [rows, depth] = self.source.copy_sizes();
        let mut codes = vec![0u32; rows * words(depth)];
        // The number of rows is a multiple of the block heights of all kinds of scaling.
        let row_block = (rows_per_task(depth) / BLOCK).max(1) * BLOCK;
        let of_band = |(number, codes): (usize, &mut [u32])| {
            vectorized(
                #[inline(always)]
                || self.row_block(number * row_block, codes, format),
            )
        };
        let length = (row_block * words(depth)).max(1);
        let parts = map_tasks(codes.chunks_mut(length).enumerate(), of_band);
        let (scales, seen): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        QuantizedCopy {
            codes,
            scales: scales.concat(),
            seen: seen
                .into_iter()
                .fold(RangeStatistics::default(), RangeStatistics::and),
        }
    }

    /// Quantizes rows into `codes`, starting at row `top`. Returns the scales of these rows and the statistics of their
    /// values.
    #[inline(always)]
    fn row_block(
        &self,
        top: usize,
        codes: &mut [u32],
        format: Format,
    ) -> (Vec<u32>, RangeStatistics) {
        let depth = self.source.copy_sizes()[1];
        let stride = words(depth);
        let rows = codes.len() / stride;
        let high = self.kind.height().max(TILE_ROWS);
        let mut tile = vec![0f32; high * BLOCK];
        let (mut scales, mut seen) = (vec![], RangeStatistics::default());
        let wide = depth.div_ceil(BLOCK);
        for above in (0..rows).step_by(high) {
            let count = high.min(rows - above);
            let first = scales.len();
            scales.resize(first + self.kind.scale_rows(count) * wide, 0);
            for (block, left) in (0..depth).step_by(BLOCK).enumerate() {
                let width = BLOCK.min(depth - left);
                self.source
                    .load([top + above, count], [left, width], &mut tile);
                let tile = tile.chunks_exact(BLOCK).map(|row| &row[..width]);
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut codes[above * stride..]);
                let codes = bytes.chunks_mut(4 * stride);
                let codes = codes.map(|row| &mut row[left..left + width]);
                let rest = scales.get_mut(first + block..).unwrap_or_default();
                let scales = rest.iter_mut().step_by(wide);
                let lines = tile.zip(codes).take(count);
                seen = seen.and(self.tile(lines, scales, format));
            }
        }
        if cfg!(target_endian = "big") {
            codes.iter_mut().for_each(|word| *word = word.swap_bytes());
        }
        (scales, seen)
    }

    /// Quantizes parts of rows with up to [`BLOCK`] values. `lines` is a buffer for values and codes. The scales are
    /// written to `scales`.
    #[inline(always)]
    fn tile<'t>(
        &self,
        lines: impl Iterator<Item = (&'t [f32], &'t mut [u8])>,
        mut scales: impl Iterator<Item = &'t mut u32>,
        format: Format,
    ) -> RangeStatistics {
        let mut seen = RangeStatistics::default();
        match self.kind {
            ScalingKind::Tensor => {
                for (values, codes) in lines {
                    let amax = largest(values.iter().copied());
                    let beyond = encode(values, [self.given, 1.0], codes, format);
                    seen = seen.and(RangeStatistics { amax, beyond });
                }
            }
            ScalingKind::Blocks {
                square: false,
                power_of_two,
            } => {
                for ((values, codes), scale) in lines.zip(scales) {
                    let amax = largest(values.iter().copied());
                    let factor = block_scale(amax, format, power_of_two);
                    *scale = (1.0 / factor).to_bits();
                    let beyond = encode(values, [factor, 1.0], codes, format);
                    seen = seen.and(RangeStatistics { amax, beyond });
                }
            }
            ScalingKind::Blocks {
                square: true,
                power_of_two,
            } => {
                let lines: Vec<_> = lines.collect();
                let rows = lines.iter().map(|(values, _)| values.iter().copied());
                let amax = rows.map(largest).max().unwrap_or(0);
                let factor = block_scale(amax, format, power_of_two);
                scales
                    .by_ref()
                    .take(1)
                    .for_each(|scale| *scale = (1.0 / factor).to_bits());
                for (values, codes) in lines {
                    let beyond = encode(values, [factor, 1.0], codes, format);
                    seen = seen.and(RangeStatistics { amax, beyond });
                }
            }
            ScalingKind::Mx => {
                for ((values, codes), scale) in lines.zip(scales) {
                    let blocks = values.chunks(MX_BLOCK).zip(codes.chunks_mut(MX_BLOCK));
                    for (block, (values, codes)) in blocks.enumerate() {
                        let amax = largest(values.iter().copied());
                        let code = e8m0::of_amax(f32::from_bits(amax));
                        *scale |= u32::from(code) << (8 * block);
                        let beyond = encode(values, factors(code), codes, format);
                        seen = seen.and(RangeStatistics { amax, beyond });
                    }
                }
            }
        }
        seen
    }
}

fn block_scale(amax: u32, format: Format, power_of_two: bool) -> f32 {
    let options = CurrentScale {
        epsilon: 0.0,
        power_of_two,
    };
    current(f32::from_bits(amax), format, options)
}

/// Encodes the values, multiplied by both factors. Returns the number of saturated values.
#[inline(always)]
fn encode(values: &[f32], [first, second]: [f32; 2], codes: &mut [u8], format: Format) -> u32 {
    let mut beyond = 0;
    for (value, code) in values.iter().zip(codes) {
        let value = value * first * second;
        beyond += u32::from(value.abs() > format.max());
        *code = format.encode(value);
    }
    beyond
}
