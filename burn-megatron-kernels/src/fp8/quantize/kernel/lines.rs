//! The largest magnitudes of the rows and columns of a tile, and their scales.

use cubecl::prelude::*;

use super::super::scaling::ScalingKind;
use super::plan::QuantizePlan;
use super::scale::{block_scale, magnitude, reciprocal};
use crate::fp8::kernel::e8m0_of_amax;
use crate::fp8::kernel::tile::{GROUPS, PATCH_ROWS, staged_index};
use crate::fp8::matrix::BLOCK;

/// The maximum number of blocks per line.
pub(super) const LINE_BLOCKS: usize = 4;

/// Returns the index of a block's scale in shared memory. Columns follow the rows.
#[cube]
pub(super) fn slot(line: usize, block: usize, #[comptime] columns: bool) -> usize {
    (line + comptime!(if columns { BLOCK } else { 0 })) * LINE_BLOCKS + block
}

/// Returns one value of a unit. The patches of the unit are stacked, so `line` counts the rows of all patches.
#[cube]
pub(super) fn value<F: Float, N: Size>(
    kept: &Array<Vector<F, N>>,
    line: usize,
    #[comptime] lane: usize,
    #[comptime] plan: QuantizePlan,
) -> f32 {
    let vector = kept[line * comptime!(plan.loads()) + comptime!(lane / plan.vector)];
    f32::cast_from(vector.extract(comptime!(lane % plan.vector)))
}

/// Stores the largest bits of the blocks of each row in their slots. All units of the cube must
/// call it. The slots are readable after a synchronisation.
#[cube]
pub(super) fn row_maxima<F: Float, N: Size>(
    kept: &Array<Vector<F, N>>,
    staged: &mut Shared<[u32]>,
    slots: &mut Shared<[u32]>,
    #[comptime] plan: QuantizePlan,
) {
    let across = UNIT_POS as usize % comptime!(plan.across());
    let group = UNIT_POS as usize / comptime!(plan.across());
    let lanes = comptime!(plan.lanes());
    let unrolled = comptime!(plan.unrolled);
    #[unroll(unrolled)]
    for line in 0..comptime!(plan.patches() * PATCH_ROWS) {
        let mut most = 0u32;
        #[unroll]
        for lane in 0..comptime!(plan.patch()) {
            most = max(most, magnitude(value(kept, line, lane, plan)));
        }
        let groups = line / PATCH_ROWS * comptime!(plan.groups());
        let row = (group + groups) * PATCH_ROWS + line % PATCH_ROWS;
        if comptime!(plan.shuffles()) {
            #[unroll]
            for step in 0..comptime!(lanes.ilog2()) {
                most = max(most, plane_shuffle_xor(most, comptime!(1u32 << step)));
            }
            let lane = across % lanes;
            if lane == 0 {
                slots[slot(row, across / lanes, false)] = most;
            }
        } else {
            staged[staged_index(row, across)] = most;
        }
    }
    if comptime!(!plan.shuffles()) {
        gather(staged, slots, lanes, false, plan);
    }
}

/// Stores the largest bits of the blocks of each column in their slots; see [`row_maxima`].
#[cube]
pub(super) fn column_maxima<F: Float, N: Size>(
    kept: &Array<Vector<F, N>>,
    staged: &mut Shared<[u32]>,
    slots: &mut Shared<[u32]>,
    #[comptime] plan: QuantizePlan,
) {
    let across = UNIT_POS as usize % comptime!(plan.across());
    let group = UNIT_POS as usize / comptime!(plan.across());
    let unrolled = comptime!(plan.unrolled);
    #[unroll(unrolled)]
    for patch in 0..comptime!(plan.patches()) {
        #[unroll]
        for lane in 0..comptime!(plan.patch()) {
            let mut most = 0u32;
            #[unroll]
            for row in 0..PATCH_ROWS {
                let line = patch * PATCH_ROWS + row;
                most = max(most, magnitude(value(kept, line, lane, plan)));
            }
            let column = across * comptime!(plan.patch()) + lane;
            staged[staged_index(column, group + patch * comptime!(plan.groups()))] = most;
        }
    }
    gather(staged, slots, comptime!(GROUPS / plan.blocks()), true, plan);
}

/// Stores the largest of each `parts` adjacent words, for all blocks of a line.
#[cube]
fn gather(
    staged: &mut Shared<[u32]>,
    slots: &mut Shared<[u32]>,
    #[comptime] parts: usize,
    #[comptime] columns: bool,
    #[comptime] plan: QuantizePlan,
) {
    sync_cube();
    let line = UNIT_POS as usize;
    if line < BLOCK {
        #[unroll]
        for block in 0..comptime!(plan.blocks()) {
            let mut most = 0u32;
            for part in 0..parts {
                most = max(
                    most,
                    staged[staged_index(line, comptime!(block * parts) + part)],
                );
            }
            slots[slot(line, block, columns)] = most;
        }
    }
    sync_cube();
}

/// Returns the bits of `2^(127 - code)`, or NaN for NaN. Only the last value is subnormal.
#[cube]
fn factor(code: u32) -> u32 {
    let power = select(
        code == 254,
        0x0040_0000u32,
        (254u32 - min(code, 254u32)) << 23,
    );
    select(code == 255, 0x7fc0_0000u32, power)
}

/// Converts the maxima of a line to scales.
///
/// If the line is `inside` the matrix, they are stored to `scales` at `at` for the product. They
/// are also stored in their slots for the kernel, as the bits of the factor of the values. For MX,
/// where the factor could be flushed to 0, the slots hold E8M0 codes.
#[cube]
pub(super) fn store_scales(
    slots: &mut Shared<[u32]>,
    scales: &mut [u32],
    line: usize,
    at: usize,
    inside: bool,
    #[comptime] columns: bool,
    #[comptime] plan: QuantizePlan,
) {
    let mut word = 0u32;
    #[unroll]
    for block in 0..comptime!(plan.blocks()) {
        let own = slot(line, block, columns);
        let amax = slots[own];
        if comptime!(plan.kind == ScalingKind::Mx) {
            let code = e8m0_of_amax(f32::reinterpret(amax));
            slots[own] = if comptime!(plan.flushes) {
                code
            } else {
                factor(code)
            };
            word |= code << comptime!(8 * block as u32);
        } else {
            let scale = block_scale(amax, plan.format, comptime!(plan.power_of_two()));
            slots[own] = scale;
            word = reciprocal(scale, comptime!(plan.power_of_two()));
        }
    }
    if inside {
        scales[at] = word;
    }
}
