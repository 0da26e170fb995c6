//! Computes the product with panels of doubles and blocks of sums in registers.

use super::rules::Matrix;

/// The numbers of rows and columns of a block of sums.
const ROWS: usize = 4;
const COLUMNS: usize = 8;

/// A factor as rows (`A`) or columns (`B`) of `k` elements, independent of its memory layout.
pub(super) struct Factor<'a> {
    pub matrix: &'a Matrix,
    pub address: u64,
    pub outer: usize,
    pub k: usize,
    /// Whether elements along `k` are adjacent in memory.
    pub along: bool,
}

impl Factor<'_> {
    /// Writes the elements of `WIDTH` rows from `first` on. The elements of each `k` are adjacent. Rows beyond the
    /// end are zero.
    ///
    /// # Safety
    /// The matrix must be valid for reading.
    unsafe fn panel<const WIDTH: usize>(
        &self,
        first: usize,
        scale: &impl Fn(usize, usize) -> f64,
        panel: &mut [f64],
    ) {
        let (element, leading) = (self.matrix.element, self.matrix.leading);
        for (k, values) in panel.chunks_exact_mut(WIDTH).enumerate() {
            for (offset, value) in values.iter_mut().enumerate() {
                let outer = first + offset;
                *value = if outer < self.outer {
                    let index = if self.along {
                        outer * leading + k
                    } else {
                        k * leading + outer
                    };
                    let address = self.address + (index * element.bytes()) as u64;
                    // SAFETY: guaranteed by the caller of this function, since the index is inside the matrix.
                    unsafe { element.load(address) * scale(outer, k) }
                } else {
                    0.0
                };
            }
        }
    }
}

/// Calls `each` with the sum over `k` of every row and column. All sums are in the order of `k`.
///
/// # Safety
/// Both matrices must be valid for reading.
pub(super) unsafe fn multiply(
    [a, b]: [&Factor<'_>; 2],
    scale_a: impl Fn(usize, usize) -> f64,
    scale_b: impl Fn(usize, usize) -> f64,
    mut each: impl FnMut(usize, usize, f64),
) {
    let k = a.k;
    let mut columns = vec![0.0; b.outer.div_ceil(COLUMNS) * COLUMNS * k];
    for (number, panel) in columns.chunks_exact_mut(COLUMNS * k).enumerate() {
        // SAFETY: guaranteed by the caller of this function.
        unsafe { b.panel::<COLUMNS>(number * COLUMNS, &scale_b, panel) };
    }
    let mut rows = vec![0.0; ROWS * k];
    for row in (0..a.outer).step_by(ROWS) {
        // SAFETY: guaranteed by the caller of this function.
        unsafe { a.panel::<ROWS>(row, &scale_a, &mut rows) };
        for (number, panel) in columns.chunks_exact(COLUMNS * k).enumerate() {
            let sums = block(&rows, panel);
            for (i, sums) in sums.iter().enumerate().take(a.outer - row) {
                let column = number * COLUMNS;
                for (j, sum) in sums.iter().enumerate().take(b.outer - column) {
                    each(row + i, column + j, *sum);
                }
            }
        }
    }
}

/// Returns the sums of a panel of rows with a panel of columns.
fn block(rows: &[f64], columns: &[f64]) -> [[f64; COLUMNS]; ROWS] {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor supports AVX2.
        return unsafe { block_avx2(rows, columns) };
    }
    sums(rows, columns)
}

/// Computes the same bits as [`sums`], since it contains no fused multiply-add.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn block_avx2(rows: &[f64], columns: &[f64]) -> [[f64; COLUMNS]; ROWS] {
    sums(rows, columns)
}

#[inline(always)]
fn sums(rows: &[f64], columns: &[f64]) -> [[f64; COLUMNS]; ROWS] {
    let mut sums = [[0.0; COLUMNS]; ROWS];
    let (rows, _) = rows.as_chunks::<ROWS>();
    let (columns, _) = columns.as_chunks::<COLUMNS>();
    for (row, column) in rows.iter().zip(columns) {
        for (sums, a) in sums.iter_mut().zip(row) {
            for (sum, b) in sums.iter_mut().zip(column) {
                *sum += a * b;
            }
        }
    }
    sums
}
