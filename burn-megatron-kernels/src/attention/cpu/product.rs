//! Matrix multiplication of tiles that stay in registers.
//!
//! Matrices are padded, so that all tiles are complete. A tile has [`ROWS`] rows and [`LANES`] columns.

use crate::cpu::Real;

/// The number of rows of a tile.
pub(super) const ROWS: usize = 8;
/// The number of columns of a tile. The padded width of a matrix is a multiple of this number.
pub(super) const LANES: usize = 16;

/// A matrix whose rows are `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct MatrixRows<'a, T> {
    pub values: &'a [T],
    pub stride: usize,
}

impl<'a, T> MatrixRows<'a, T> {
    /// Returns the matrix that starts at row `row`.
    #[inline(always)]
    pub(super) fn from(&self, row: usize) -> Self {
        Self {
            values: &self.values[row * self.stride..],
            stride: self.stride,
        }
    }
}

/// Returns [`LANES`] elements, starting at `at`.
#[inline(always)]
pub(super) fn lanes<T>(values: &[T], at: usize) -> &[T; LANES] {
    match values[at..at + LANES].try_into() {
        Ok(lanes) => lanes,
        Err(_) => unreachable!("the slice has the expected number of elements"),
    }
}

#[inline(always)]
fn lanes_mut<T>(values: &mut [T], at: usize) -> &mut [T; LANES] {
    match (&mut values[at..at + LANES]).try_into() {
        Ok(lanes) => lanes,
        Err(_) => unreachable!("the slice has the expected number of elements"),
    }
}

/// Returns `sums + a b` for one row of a tile.
#[inline(always)]
fn plus<T: Real, const FUSED: bool>(mut sums: [T; LANES], a: T, b: &[T; LANES]) -> [T; LANES] {
    for n in 0..LANES {
        sums[n] = a.times_plus::<FUSED>(b[n], sums[n]);
    }
    sums
}

/// Repeats the body for each of [`ROWS`] rows. A loop would be vectorized over the wrong dimension.
macro_rules! unrolled {
    ($m:ident => $body:expr) => {
        unrolled!($m => $body, 0, 1, 2, 3, 4, 5, 6, 7)
    };
    ($m:ident => $body:expr, $($index:literal),*) => {
        $({
            const $m: usize = $index;
            $body;
        })*
    };
}

/// Computes one tile of `sum_k a[m][k] b[k][n]`.
#[inline(always)]
fn tile<T: Real, const FUSED: bool>(
    depth: usize,
    a: &impl LeftColumns<T>,
    b: MatrixRows<'_, T>,
) -> [[T; LANES]; ROWS] {
    let mut sums = [[T::ZERO; LANES]; ROWS];
    for k in 0..depth {
        let (a, b) = (a.column(k), lanes(b.values, k * b.stride));
        unrolled!(M => sums[M] = plus::<T, FUSED>(sums[M], a[M], b));
    }
    sums
}

/// The left operand of a tile product, read one column of [`ROWS`] rows at a time. It is a trait because a closure may
/// not be inlined.
trait LeftColumns<T> {
    fn column(&self, k: usize) -> [T; ROWS];
}

/// The columns of [`ROWS`] rows.
struct RowColumns<'a, T>([&'a [T]; ROWS]);

impl<'a, T: Real> RowColumns<'a, T> {
    #[inline(always)]
    fn new(a: MatrixRows<'a, T>, depth: usize) -> Self {
        let mut rows = [&a.values[..0]; ROWS];
        unrolled!(M => rows[M] = &a.values[M * a.stride..][..depth]);
        Self(rows)
    }
}

impl<T: Real> LeftColumns<T> for RowColumns<'_, T> {
    #[inline(always)]
    fn column(&self, k: usize) -> [T; ROWS] {
        let mut column = [T::ZERO; ROWS];
        unrolled!(M => column[M] = self.0[M][k]);
        column
    }
}

/// The columns of a transposed matrix: [`ROWS`] adjacent elements of each row, starting at `first`.
struct Transposed<'a, T> {
    a: MatrixRows<'a, T>,
    first: usize,
}

impl<T: Real> LeftColumns<T> for Transposed<'_, T> {
    #[inline(always)]
    fn column(&self, k: usize) -> [T; ROWS] {
        match self.a.values[k * self.a.stride + self.first..][..ROWS].try_into() {
            Ok(column) => column,
            Err(_) => unreachable!("the slice has the expected number of elements"),
        }
    }
}

/// Computes `a b^T` for [`ROWS`] rows of `a`. `b` is in panels of [`LANES`] rows,
/// `[panel][depth][LANES]`.
#[inline(always)]
pub(super) fn times_panels<T: Real, const FUSED: bool>(
    a: MatrixRows<'_, T>,
    depth: usize,
    panels: &[T],
    out: &mut [T],
    stride: usize,
) {
    let a = RowColumns::new(a, depth);
    for (panel, b) in panels.chunks_exact(depth * LANES).enumerate() {
        let b = MatrixRows {
            values: b,
            stride: LANES,
        };
        let sums = tile::<T, FUSED>(depth, &a, b);
        unrolled!(M => *lanes_mut(out, M * stride + panel * LANES) = sums[M]);
    }
}

/// Computes `a b` for [`ROWS`] rows of `a` of length `depth`. The rows of `out` are as wide as the
/// rows of `b`.
#[inline(always)]
pub(super) fn times_rows<T: Real, const FUSED: bool>(
    a: MatrixRows<'_, T>,
    depth: usize,
    b: MatrixRows<'_, T>,
    out: &mut [T],
) {
    let a = RowColumns::new(a, depth);
    for column in (0..b.stride).step_by(LANES) {
        let from = MatrixRows {
            values: &b.values[column..],
            stride: b.stride,
        };
        let sums = tile::<T, FUSED>(depth, &a, from);
        unrolled!(M => *lanes_mut(out, M * b.stride + column) = sums[M]);
    }
}

/// Adds `a^T b` to `out` for `depth` rows of `a` and the first `columns` columns.
#[inline(always)]
pub(super) fn add_transposed_times<T: Real, const FUSED: bool>(
    a: MatrixRows<'_, T>,
    columns: usize,
    depth: usize,
    b: MatrixRows<'_, T>,
    out: &mut [T],
) {
    for row in (0..columns).step_by(ROWS) {
        let transposed = Transposed { a, first: row };
        for column in (0..b.stride).step_by(LANES) {
            let from = MatrixRows {
                values: &b.values[column..],
                stride: b.stride,
            };
            let sums = tile::<T, FUSED>(depth, &transposed, from);
            unrolled!(M => {
                let out = lanes_mut(out, (row + M) * b.stride + column);
                *out = plus::<T, FUSED>(*out, T::ONE, &sums[M]);
            });
        }
    }
}
