//! The kernel that converts a tile of the matrix to the codes of both copies.

use cubecl::prelude::*;

use super::super::scaling::ScalingKind;
use super::input::vector_at;
use super::lines::{LINE_BLOCKS, column_maxima, row_maxima, slot, store_scales, value};
use super::plan::QuantizePlan;
use super::reduce::cube_total;
use super::scale::{block_scale, magnitude, reciprocal, times};
use crate::fp8::kernel::tile::{
    GROUPS, PATCH_ROWS, STAGED, staged_index, transposed_words, write_columns,
};
use crate::fp8::kernel::{e8m0_factors, encode_word};
use crate::fp8::matrix::BLOCK;

/// Returns a value times a scale. The scale has the form that [`store_scales`] stores.
#[cube]
fn scaled(value: f32, scale: u32, #[comptime] plan: QuantizePlan) -> f32 {
    if comptime!(plan.kind == ScalingKind::Mx && plan.flushes) {
        let (first, second) = e8m0_factors(scale);
        times(times(value, first, plan.flushes), second, plan.flushes)
    } else {
        times(value, f32::reinterpret(scale), plan.flushes)
    }
}

/// Returns 1 if the value exceeds the largest value of the format, otherwise 0. Returns 0 for NaN.
#[cube]
fn exceeds_max(value: f32, #[comptime] plan: QuantizePlan) -> u32 {
    if comptime!(plan.flushes) {
        // Comparisons with NaN are not specified in shading languages. One unsigned comparison replaces two
        // comparisons, because the difference wraps around for values up to the largest value.
        let most = magnitude(value);
        let least = comptime!(plan.format.max().to_bits() + 1);
        u32::cast_from(most - least <= comptime!(0x7f80_0000 - least))
    } else {
        u32::cast_from(value.abs() > comptime!(plan.format.max()))
    }
}

/// Returns `word`, which holds the codes starting at `at`, with zeros after the end `end` of the line. The codes after
/// the end are 0 anyway, except for MX, whose scale may be NaN.
#[cube]
fn inside(word: u32, at: usize, end: usize, #[comptime] plan: QuantizePlan) -> u32 {
    if comptime!(plan.kind == ScalingKind::Mx) {
        let left = (max(at, end) - at) as u32;
        let mask = (1u32 << (8 * min(left, 3u32))) - 1;
        select(left > 3, word, word & mask)
    } else {
        word
    }
}

/// Quantizes one tile of 128 x 128 elements per cube.
///
/// - `bias` is the bias of an activation.
/// - Copies that [`QuantizePlan::usage`] does not request are neither read nor written.
/// - With [`ScalingKind::Tensor`], the scale is `given[index]`. Other kinds do not read `given`.
/// - Scales are written as bits.
/// - `partials` `[cubes, 2]` receives the bits of the largest magnitude of the tile, and the number of saturated
///   values.
#[cube(launch_unchecked)]
pub(super) fn quantize_kernel<F: Float, N: Size, W: Size, Q: Size>(
    x: &[Vector<F, N>],
    bias: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    given: &[u32],
    row_codes: &mut [Vector<u32, W>],
    row_scales: &mut [u32],
    column_codes: &mut [Vector<u32, Q>],
    column_scales: &mut [u32],
    partials: &mut [u32],
    index: u32,
    rows: u32,
    columns: u32,
    #[comptime] plan: QuantizePlan,
    #[define(F)] _dtype: ElemType,
) {
    let (rows, columns) = (rows as usize, columns as usize);
    let high = rows.div_ceil(BLOCK);
    let wide = columns.div_ceil(BLOCK);
    let tile = CUBE_POS;
    if tile < high * wide {
        let (down, right) = (tile / wide, tile % wide);
        let (top, left) = (down * BLOCK, right * BLOCK);
        let across = UNIT_POS as usize % comptime!(plan.across());
        let group = UNIT_POS as usize / comptime!(plan.across());
        let patch_width = comptime!(plan.patch());
        let first = left + across * patch_width;

        let unrolled = comptime!(plan.unrolled);
        let mut kept = Array::<Vector<F, N>>::new(comptime!(plan.kept()));
        let mut most = 0u32;
        #[unroll(unrolled)]
        for line in 0..comptime!(plan.patches() * PATCH_ROWS) {
            let groups = line / PATCH_ROWS * comptime!(plan.groups());
            let row = top + (group + groups) * PATCH_ROWS + line % PATCH_ROWS;
            #[unroll]
            for load in 0..comptime!(plan.loads()) {
                let column = first + comptime!(load * plan.vector);
                let mut vector = Vector::<F, N>::new(F::from_int(0));
                if row < rows && column < columns {
                    let wide = columns / comptime!(plan.vector);
                    vector = vector_at(x, bias, row, column / comptime!(plan.vector), wide, plan);
                }
                kept[line * comptime!(plan.loads()) + load] = vector;
            }
        }
        #[unroll(unrolled)]
        for line in 0..comptime!(plan.patches() * PATCH_ROWS) {
            #[unroll]
            for lane in 0..patch_width {
                most = max(most, magnitude(value(&kept, line, lane, plan)));
            }
        }
        let amax = cube_total(most, false, plan.planes);
        // The magnitude is written before the count is known, so that no register holds it until then.
        if UNIT_POS == 0 {
            partials[tile * 2] = amax;
        }

        let mut staged = Shared::<[u32]>::new_slice(STAGED);
        let mut slots = Shared::<[u32]>::new_slice(comptime!(2 * BLOCK * LINE_BLOCKS));
        let mut scale = 0u32;
        if comptime!(plan.kind == ScalingKind::Tensor) {
            scale = given[index as usize];
        } else if comptime!(!plan.by_lines()) {
            scale = block_scale(amax, plan.format, comptime!(plan.power_of_two()));
            if UNIT_POS == 0 {
                let descale = reciprocal(scale, comptime!(plan.power_of_two()));
                if comptime!(plan.usage.rowwise) {
                    row_scales[down * wide + right] = descale;
                }
                if comptime!(plan.usage.columnwise) {
                    column_scales[right * high + down] = descale;
                }
            }
        } else {
            if comptime!(plan.usage.rowwise) {
                row_maxima(&kept, &mut staged, &mut slots, plan);
            }
            if comptime!(plan.usage.columnwise) {
                column_maxima(&kept, &mut staged, &mut slots, plan);
            }
            sync_cube();
            let line = UNIT_POS as usize % BLOCK;
            if UNIT_POS < comptime!(BLOCK as u32) {
                if comptime!(plan.usage.rowwise) {
                    let at = (top + line) * wide + right;
                    store_scales(
                        &mut slots,
                        row_scales,
                        line,
                        at,
                        top + line < rows,
                        false,
                        plan,
                    );
                }
            } else {
                if comptime!(plan.usage.columnwise) {
                    let at = (left + line) * high + down;
                    store_scales(
                        &mut slots,
                        column_scales,
                        line,
                        at,
                        left + line < columns,
                        true,
                        plan,
                    );
                }
            }
            sync_cube();
        }

        let mut count = 0u32;
        let words = comptime!(patch_width / 4);
        #[unroll(unrolled)]
        for patch in 0..comptime!(plan.patches()) {
            let own = group + patch * comptime!(plan.groups());
            // The codes of a patch, row by row, with `words` words per row.
            let mut codes = Array::<u32>::new(patch_width);
            if comptime!(plan.along_rows()) {
                #[unroll(unrolled)]
                for row in 0..PATCH_ROWS {
                    if comptime!(plan.by_lines()) {
                        let block = across / comptime!(plan.lanes());
                        scale = slots[slot(own * PATCH_ROWS + row, block, false)];
                    }
                    let mut to = Vector::<u32, W>::empty();
                    #[unroll]
                    for word in 0..words {
                        let mut four = Vector::<f32, Q>::empty();
                        #[unroll]
                        for at in 0..4usize {
                            let line = patch * PATCH_ROWS + row;
                            let raw = value(&kept, line, comptime!(word * 4 + at), plan);
                            let result = scaled(raw, scale, plan);
                            count += exceeds_max(result, plan);
                            four.insert(at, result);
                        }
                        let packed = encode_word(four, 0usize, plan.format);
                        let packed = inside(packed, first + word * 4, columns, plan);
                        codes[row * words + word] = packed;
                        to.insert(word, packed);
                    }
                    if comptime!(plan.usage.rowwise) {
                        let row = top + own * PATCH_ROWS + row;
                        let stride = columns.div_ceil(16) * 4;
                        if row < rows && first / 4 < stride {
                            row_codes[(row * stride + first / 4) / words] = to;
                        }
                    }
                }
            }
            if comptime!(plan.usage.columnwise && plan.kind.shares_codes()) {
                #[unroll]
                for word in 0..words {
                    let transposed_words = transposed_words(
                        codes[word],
                        codes[comptime!(words + word)],
                        codes[comptime!(2 * words + word)],
                        codes[comptime!(3 * words + word)],
                    );
                    let column = across * patch_width + comptime!(word * 4);
                    staged[staged_index(column, own)] = transposed_words.0;
                    staged[staged_index(column + 1, own)] = transposed_words.1;
                    staged[staged_index(column + 2, own)] = transposed_words.2;
                    staged[staged_index(column + 3, own)] = transposed_words.3;
                }
            } else if comptime!(plan.usage.columnwise) {
                let block = own / comptime!(GROUPS / plan.blocks());
                #[unroll]
                for lane in 0..patch_width {
                    let column = across * patch_width + lane;
                    scale = slots[slot(column, block, true)];
                    let mut four = Vector::<f32, Q>::empty();
                    #[unroll]
                    for row in 0..PATCH_ROWS {
                        let line = patch * PATCH_ROWS + row;
                        let result = scaled(value(&kept, line, lane, plan), scale, plan);
                        if comptime!(!plan.along_rows()) {
                            count += exceeds_max(result, plan);
                        }
                        four.insert(row, result);
                    }
                    let packed = encode_word(four, 0usize, plan.format);
                    staged[staged_index(column, own)] =
                        inside(packed, top + own * PATCH_ROWS, rows, plan);
                }
            }
        }
        let count = cube_total(count, true, plan.planes);
        if UNIT_POS == 0 {
            if comptime!(plan.computes_tile_again()) {
                let tile = top / BLOCK * wide + left / BLOCK;
                partials[tile * 2 + 1] = count;
            } else {
                partials[tile * 2 + 1] = count;
            }
        }
        if comptime!(plan.usage.columnwise) {
            // The units of the cube have synchronized since the last column was written to shared memory.
            write_columns(&staged, column_codes, top, left, rows, columns);
        }
    }
}
