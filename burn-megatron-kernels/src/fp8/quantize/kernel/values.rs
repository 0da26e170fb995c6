//! The kernels that do not write codes: the largest magnitude, and dequantization.

use cubecl::prelude::*;

use super::super::scaling::ScalingKind;
use super::reduce::cube_total;
use super::scale::{magnitude, times};
use crate::fp8::format::Format;
use crate::fp8::kernel::tile::UNITS;
use crate::fp8::kernel::{decode, e8m0_decode};
use crate::fp8::matrix::{BLOCK, MX_BLOCK};

/// The number of vectors per unit.
pub(super) const VECTORS: u32 = 8;

/// Computes the bits of the largest magnitude of the values that each cube reads.
#[cube(launch_unchecked)]
pub(super) fn amax_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    partials: &mut [u32],
    vectors: u32,
    #[comptime] planes: bool,
    #[define(F)] _dtype: ElemType,
) {
    let start = CUBE_POS * comptime!((UNITS * VECTORS) as usize) + UNIT_POS as usize;
    if CUBE_POS * comptime!((UNITS * VECTORS) as usize) < vectors as usize {
        let mut most = 0u32;
        #[unroll]
        for step in 0..VECTORS {
            let at = start + comptime!((step * UNITS) as usize);
            if at < vectors as usize {
                let vector = x[at];
                #[unroll]
                for lane in 0..N::value() {
                    most = max(most, magnitude(f32::cast_from(vector.extract(lane))));
                }
            }
        }
        let most = cube_total(most, false, planes);
        if UNIT_POS == 0 {
            partials[CUBE_POS] = most;
        }
    }
}

/// The compile-time parameters of dequantization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct DequantizeVariant {
    pub kind: ScalingKind,
    pub format: Format,
    /// Whether the device may treat subnormal floats as 0.
    pub flushes: bool,
}

/// Computes four values from one word of codes per unit. Scales are read as bits. `depth` is a multiple of the vector
/// size, which is 4 or 1.
#[cube(launch_unchecked)]
pub(super) fn dequantize_kernel<N: Size>(
    codes: &[u32],
    scales: &[u32],
    values: &mut [Vector<f32, N>],
    rows: u32,
    depth: u32,
    #[comptime] reading: DequantizeVariant,
    #[comptime] vector: usize,
) {
    let depth = depth as usize;
    let used = depth.div_ceil(4);
    let unit = CUBE_POS * comptime!(UNITS as usize) + UNIT_POS as usize;
    let (row, word) = (unit / used, unit % used);
    if row < rows as usize {
        let wide = depth.div_ceil(BLOCK);
        let scale = if comptime!(reading.kind == ScalingKind::Tensor) {
            f32::reinterpret(scales[0])
        } else if comptime!(reading.kind == ScalingKind::Mx) {
            let block = word / comptime!(MX_BLOCK / 4);
            let four = scales[row * wide + block / 4];
            e8m0_decode(four >> (8 * (block % 4) as u32))
        } else {
            let height = comptime!(reading.kind.height());
            f32::reinterpret(scales[row / height * wide + word / comptime!(BLOCK / 4)])
        };
        let four = codes[row * (depth.div_ceil(16) * 4) + word];
        #[unroll]
        for store in 0..comptime!(4 / vector) {
            let mut some = Vector::<f32, N>::empty();
            #[unroll]
            for lane in 0..vector {
                let code = four >> comptime!(8 * (store * vector + lane) as u32);
                let value = decode(code & 0xff, reading.format);
                some.insert(lane, times(scale, value, reading.flushes));
            }
            let at = word * 4 + comptime!(store * vector);
            if at < depth {
                values[(row * depth + at) / vector] = some;
            }
        }
    }
}
