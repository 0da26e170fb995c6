//! Computes the largest magnitudes of the rows and columns of a tile, and their scales. A line is a row or a column.

use cubecl::prelude::*;

use super::super::scaling::ScalingKind;
use super::plan::QuantizePlan;
use super::scale::{block_scale, magnitude, reciprocal};
use crate::fp8::kernel::e8m0_of_amax;
use crate::fp8::kernel::tile::{GROUPS, PATCH_ROWS, staged_index};
use crate::fp8::matrix::BLOCK;

/// The maximum number of blocks per line.
pub(super) const LINE_BLOCKS: usize = 4;

/// Returns the index of a block's scale in shared memory (its slot). The slots of columns follow the slots of rows.
#[cube]
pub(super) fn slot(line: usize, block: usize, #[comptime] columns: bool) -> usize {
    (line + comptime!(if columns { BLOCK } else { 0 })) * LINE_BLOCKS + block
}

/// Returns one value of a unit. `line` counts the rows of all patches of the unit.
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

/// Stores the bits of the largest magnitude of each block of a row in the slot of the block. All units of the cube must
/// call this function. The slots can be read after a synchronization.
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

/// Stores the bits of the largest magnitude of each block of a column in the slot of the block. See [`row_maxima`].
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

/// Stores the maximum of each group of `parts` adjacent words, for all blocks of a line.
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

/// Returns the bits of `2^(127 - code)`, or NaN for the code of NaN. Only the factor for code 254 is subnormal.
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
/// If the line is `inside` the matrix, its scales are written to `scales` at `at` for the matrix multiplication. The
/// function also stores the factors that multiply the values in the slots, as bits. For MX, the factor could be flushed
/// to 0, so the slots hold the E8M0 codes instead.
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
