//! Matrix multiplication of a few rows on the CPU. The rows of the result have the same bits as the rows that the
//! `gemm` crate computes for a larger result. Each element is a chain of multiplications and additions in the order of
//! the depth, for each [part](depths) of the depth.
//!
//! The right operand is read once per row. This dominates the time of these multiplications.

use std::borrow::Cow;

use burn::tensor::DType;
use pulp::{Arch, Simd, WithSimd};

use super::cpu::depths;
use super::engine::Matrix;
#[cfg(target_arch = "x86_64")]
use super::row_avx2::Transposing;
use crate::cpu::{Real, for_each_task, unfused};

/// The number of columns that stay in registers.
const LANES: usize = 16;
/// The number of depth steps for which a partial sum is read once.
const STEPS: usize = 8;

/// Computes `result = left right`, or `result += left right`. The operands start at the beginning of their slices, and
/// the result is row-major.
pub(super) fn multiply<W: Real>(
    (left, left_matrix): (&[W], Matrix),
    (right, right_matrix): (&[W], Matrix),
    result: &mut [W],
    add: bool,
    parallel: bool,
) {
    let columns = right_matrix.columns;
    if columns == 0 {
        return;
    }
    if left_matrix.columns == 0 {
        if !add {
            result.fill(W::ZERO);
        }
        return;
    }
    for (index, result) in result.chunks_exact_mut(columns).enumerate() {
        let x = row_of(left, left_matrix, index);
        let task = |(first, result): (usize, &mut [W])| {
            Arch::new().dispatch(RowTask {
                x: &x,
                right,
                matrix: right_matrix,
                first,
                result,
                add,
            });
        };
        let threads = if parallel {
            rayon::current_num_threads()
        } else {
            1
        };
        let part = columns.div_ceil(threads).next_multiple_of(LANES);
        let parts = result.chunks_mut(part).enumerate();
        for_each_task(parts.map(|(i, result)| (i * part, result)), task);
    }
}

/// Returns a row of a matrix. The row is copied if it is not contiguous.
fn row_of<W: Real>(values: &[W], matrix: Matrix, row: usize) -> Cow<'_, [W]> {
    if matrix.transposed {
        let column = |k: usize| values[k * matrix.leading + row];
        Cow::Owned((0..matrix.columns).map(column).collect())
    } else {
        Cow::Borrowed(&values[row * matrix.leading..][..matrix.columns])
    }
}

/// Some columns of one row of the result. It is a struct because a closure of this size would not be inlined into SIMD
/// code.
struct RowTask<'a, W> {
    /// The row of the left operand.
    x: &'a [W],
    right: &'a [W],
    matrix: Matrix,
    /// The first column of the task.
    first: usize,
    result: &'a mut [W],
    add: bool,
}

impl<W: Real> WithSimd for RowTask<'_, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        if unfused::<S>() {
            self.compute::<false>();
        } else {
            self.compute::<true>();
        }
    }
}

impl<W: Real> RowTask<'_, W> {
    #[inline(always)]
    fn compute<const FUSED: bool>(mut self) {
        if self.matrix.transposed {
            let done = self.whole_columns();
            self.column_by_column::<FUSED>(done);
        } else {
            self.row_by_row::<FUSED>();
        }
    }

    /// Computes the first columns in complete blocks if the processor supports AVX2. Returns the number of columns that
    /// were computed.
    #[inline(always)]
    fn whole_columns(&mut self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if W::dtype() == DType::F32
            && let Some(simd) = pulp::x86::V3::try_new()
        {
            return simd.vectorize(Transposing {
                simd,
                x: bytemuck::cast_slice(self.x),
                right: bytemuck::cast_slice(&self.right[self.first * self.matrix.leading..]),
                leading: self.matrix.leading,
                result: bytemuck::cast_slice_mut(self.result),
                add: self.add,
            });
        }
        0
    }

    /// Writes a sum to the result, or adds it to the result.
    #[inline(always)]
    fn put(&mut self, column: usize, sum: W, is_first: bool) {
        let result = &mut self.result[column];
        *result = if is_first && !self.add {
            sum
        } else {
            *result + sum
        };
    }

    /// Computes the columns for a row-major right operand.
    #[inline(always)]
    fn row_by_row<const FUSED: bool>(&mut self) {
        let count = self.result.len();
        let mut sums = vec![W::ZERO; count];
        for depth in depths(self.x.len()) {
            sums.fill(W::ZERO);
            let row = |k: usize| &self.right[k * self.matrix.leading + self.first..][..count];
            let mut k = depth.start;
            while k + STEPS <= depth.end {
                let rows: [&[W]; STEPS] = std::array::from_fn(|i| row(k + i));
                chains::<W, FUSED>(&mut sums, &self.x[k..k + STEPS], rows);
                k += STEPS;
            }
            for k in k..depth.end {
                let x = self.x[k];
                for (sum, value) in sums.iter_mut().zip(row(k)) {
                    *sum = x.times_plus::<FUSED>(*value, *sum);
                }
            }
            for (column, sum) in sums.iter().enumerate() {
                self.put(column, *sum, depth.start == 0);
            }
        }
    }

    /// Computes the columns for a column-major right operand, starting at column `from`.
    #[inline(always)]
    fn column_by_column<const FUSED: bool>(&mut self, from: usize) {
        let mut column = from;
        while column < self.result.len() {
            let count = LANES.min(self.result.len() - column);
            for depth in depths(self.x.len()) {
                let mut sums = [W::ZERO; LANES];
                for k in depth.clone() {
                    let x = self.x[k];
                    for (lane, sum) in sums.iter_mut().enumerate().take(count) {
                        let place = (self.first + column + lane) * self.matrix.leading + k;
                        *sum = x.times_plus::<FUSED>(self.right[place], *sum);
                    }
                }
                for (lane, sum) in sums.iter().enumerate().take(count) {
                    self.put(column + lane, *sum, depth.start == 0);
                }
            }
            column += count;
        }
    }
}

/// Adds the products of `factors` and `rows` to the sums, [`LANES`] sums at a time.
#[inline(always)]
fn chains<W: Real, const FUSED: bool>(sums: &mut [W], factors: &[W], rows: [&[W]; STEPS]) {
    let whole = sums.len() / LANES * LANES;
    let mut column = 0;
    while column < whole {
        let mut lanes = [W::ZERO; LANES];
        lanes.copy_from_slice(&sums[column..column + LANES]);
        for (row, factor) in rows.iter().zip(factors) {
            let row = &row[column..column + LANES];
            for lane in 0..LANES {
                lanes[lane] = factor.times_plus::<FUSED>(row[lane], lanes[lane]);
            }
        }
        sums[column..column + LANES].copy_from_slice(&lanes);
        column += LANES;
    }
    for column in whole..sums.len() {
        for (row, factor) in rows.iter().zip(factors) {
            sums[column] = factor.times_plus::<FUSED>(row[column], sums[column]);
        }
    }
}
