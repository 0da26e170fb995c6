//! Reductions of bits and counts over a cube, and over the cubes of a launch.

use cubecl::prelude::*;

use super::scale::{block_scale, reciprocal};
use crate::fp8::delayed::kernel::log_entry;
use crate::fp8::format::Format;
use crate::fp8::kernel::tile::UNITS;

/// Returns the largest `value` over the units of a cube. If `add` is true, returns the sum. Every unit gets the result.
/// All units of the cube must call this function.
#[cube]
pub(in crate::fp8) fn cube_total(
    value: u32,
    #[comptime] add: bool,
    #[comptime] planes: bool,
) -> u32 {
    let mut shared = Shared::<[u32]>::new_slice(UNITS as usize);
    let mut total = 0u32;
    if comptime!(planes) {
        let own = if comptime!(add) {
            plane_sum(value)
        } else {
            plane_max(value)
        };
        if UNIT_POS_PLANE == 0 {
            shared[PLANE_POS as usize] = own;
        }
        sync_cube();
        for i in 0..UNITS / PLANE_DIM {
            total = both(total, shared[i as usize], add);
        }
    } else {
        shared[UNIT_POS as usize] = value;
        sync_cube();
        let mut jump = comptime!(UNITS / 2).runtime();
        while jump > 0 {
            if UNIT_POS < jump {
                let other = shared[(UNIT_POS + jump) as usize];
                let own = shared[UNIT_POS as usize];
                shared[UNIT_POS as usize] = both(own, other, add);
            }
            sync_cube();
            jump /= 2;
        }
        total = shared[0];
    }
    sync_cube();
    total
}

#[cube]
fn both(one: u32, other: u32, #[comptime] add: bool) -> u32 {
    if comptime!(add) {
        one + other
    } else {
        max(one, other)
    }
}

/// The compile-time parameters of [`finish_kernel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FinishVariant {
    /// Whether counts are interleaved with the maxima. The counts are summed.
    pub counts: bool,
    /// Whether the totals are added to an entry of a log.
    pub logged: bool,
    /// Whether the reciprocal of the given scale is written, which is the scale of the matrix.
    pub descale: bool,
    /// Whether plane operations are used.
    pub planes: bool,
}

/// Combines the partial results of `parts` cubes and writes the result to `seen`, as bits of f32. If `seen` is a log,
/// the result is added to its entry `slot`. The given scale is `given[index]`.
#[cube(launch_unchecked)]
pub(super) fn finish_kernel(
    partials: &[u32],
    given: &[u32],
    seen: &mut [u32],
    descale: &mut [u32],
    parts: u32,
    index: u32,
    slot: u32,
    elements: f32,
    #[comptime] finish: FinishVariant,
) {
    let stride = comptime!(1 + u32::from(finish.counts));
    let mut most = 0u32;
    let mut count = 0u32;
    let mut part = UNIT_POS;
    while part < parts {
        most = max(most, partials[(part * stride) as usize]);
        if comptime!(finish.counts) {
            count += partials[(part * stride + 1) as usize];
        }
        part += UNITS;
    }
    let most = cube_total(most, false, finish.planes);
    if comptime!(finish.counts) {
        count = cube_total(count, true, finish.planes);
    }
    if UNIT_POS == 0 {
        let beyond = f32::cast_from(count);
        if comptime!(finish.logged) {
            log_entry(seen, slot, most, beyond, elements);
        } else {
            seen[0] = most;
            if comptime!(finish.counts) {
                seen[1] = u32::reinterpret(beyond);
            }
        }
        if comptime!(finish.descale) {
            descale[0] = reciprocal(given[index as usize], false);
        }
    }
}

/// Computes the scale from one largest magnitude. See [`current_scale`](crate::fp8::current_scale). All numbers are
/// handled as bits.
#[cube(launch_unchecked)]
pub(super) fn scale_kernel(
    amax: &[u32],
    scale: &mut [u32],
    epsilon: f32,
    #[comptime] power_of_two: bool,
    #[comptime] format: Format,
) {
    if UNIT_POS == 0 {
        // Non-negative floats have the same order as their bits. NaN counts as larger than all numbers, and negative
        // numbers count as smaller.
        let bits = amax[0];
        let most = bits & 0x7fff_ffff;
        let least = u32::reinterpret(epsilon);
        let negative = bits > 0x8000_0000 && most <= 0x7f80_0000;
        let raised = select(negative || most < least, least, most);
        scale[0] = block_scale(raised, format, power_of_two);
    }
}
