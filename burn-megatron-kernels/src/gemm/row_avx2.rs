//! Multiplies one row by a column-major right operand in f32 with AVX2. Blocks of 8 columns and 8 depth steps are
//! transposed in registers, so that one register holds 8 chains of additions.

use std::arch::x86_64::__m256;

use pulp::NullaryFnOnce;
use pulp::x86::V3;

use super::cpu::depths;

/// The number of columns per register, and of depth steps per block.
const WIDTH: usize = 8;
/// The number of adjacent blocks. One block is transposed while the chain of the other block waits.
const BLOCKS: usize = 2;

/// The task that computes complete blocks of columns. It returns the number of columns that were computed.
pub(super) struct Transposing<'a> {
    pub simd: V3,
    pub x: &'a [f32],
    /// The right operand, starting at the first column of the task.
    pub right: &'a [f32],
    /// The number of elements between the starts of two columns.
    pub leading: usize,
    pub result: &'a mut [f32],
    pub add: bool,
}

impl NullaryFnOnce for Transposing<'_> {
    type Output = usize;

    #[inline(always)]
    fn call(self) -> usize {
        let groups = self.result.chunks_exact_mut(BLOCKS * WIDTH);
        let count = groups.len() * BLOCKS * WIDTH;
        for (group, result) in groups.enumerate() {
            let columns = &self.right[group * BLOCKS * WIDTH * self.leading..];
            for depth in depths(self.x.len()) {
                let mut sums = [self.simd.avx._mm256_setzero_ps(); BLOCKS];
                let whole = depth.start + depth.len() / WIDTH * WIDTH;
                for k in (depth.start..whole).step_by(WIDTH) {
                    for (block, sums) in sums.iter_mut().enumerate() {
                        let at = block * WIDTH * self.leading + k;
                        let rows = transposed(self.simd, &columns[at..], self.leading);
                        for (x, row) in self.x[k..k + WIDTH].iter().zip(rows) {
                            let x = self.simd.avx._mm256_set1_ps(*x);
                            *sums = self.simd.fma._mm256_fmadd_ps(x, row, *sums);
                        }
                    }
                }
                let sums: [[f32; WIDTH]; BLOCKS] = sums.map(pulp::cast);
                for (lane, mut sum) in sums.into_iter().flatten().enumerate() {
                    for k in whole..depth.end {
                        sum = self.x[k].mul_add(columns[lane * self.leading + k], sum);
                    }
                    let is_first = depth.start == 0 && !self.add;
                    result[lane] = if is_first { sum } else { result[lane] + sum };
                }
            }
        }
        count
    }
}

/// Returns the first 8 elements of 8 columns as 8 rows.
#[inline(always)]
fn transposed(simd: V3, columns: &[f32], leading: usize) -> [__m256; WIDTH] {
    let avx = simd.avx;
    let mut c = [avx._mm256_setzero_ps(); WIDTH];
    for (lane, c) in c.iter_mut().enumerate() {
        let mut values = [0.0; WIDTH];
        values.copy_from_slice(&columns[lane * leading..][..WIDTH]);
        *c = pulp::cast(values);
    }
    // The columns are interleaved in pairs, then in groups of four, then all eight.
    let low = |a, b| avx._mm256_unpacklo_ps(a, b);
    let high = |a, b| avx._mm256_unpackhi_ps(a, b);
    let first = |a, b| avx._mm256_shuffle_ps::<0x44>(a, b);
    let second = |a, b| avx._mm256_shuffle_ps::<0xEE>(a, b);
    let lower = |a, b| avx._mm256_permute2f128_ps::<0x20>(a, b);
    let upper = |a, b| avx._mm256_permute2f128_ps::<0x31>(a, b);
    let pairs = [
        (low(c[0], c[1]), high(c[0], c[1])),
        (low(c[2], c[3]), high(c[2], c[3])),
        (low(c[4], c[5]), high(c[4], c[5])),
        (low(c[6], c[7]), high(c[6], c[7])),
    ];
    let four = |a: (__m256, __m256), b: (__m256, __m256)| {
        [
            first(a.0, b.0),
            second(a.0, b.0),
            first(a.1, b.1),
            second(a.1, b.1),
        ]
    };
    let (a, b) = (four(pairs[0], pairs[1]), four(pairs[2], pairs[3]));
    [
        lower(a[0], b[0]),
        lower(a[1], b[1]),
        lower(a[2], b[2]),
        lower(a[3], b[3]),
        upper(a[0], b[0]),
        upper(a[1], b[1]),
        upper(a[2], b[2]),
        upper(a[3], b[3]),
    ]
}
