//! The CubeCL implementation of the transposition and the padding of codes.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::kernel::tile::{
    GROUPS, PATCH_ROWS, STAGED, UNITS, staged_index, transposed_words, write_columns,
};
use super::{BLOCK, words};
use crate::cube::instance::{AotList, instance};
use crate::cube::{empty, launch};

/// The number of 16-code loads per row of a tile. A cube has this number of units for every 4 rows.
const LOADS_PER_ROW: usize = BLOCK / 16;
const _: () = assert!(LOADS_PER_ROW * GROUPS == UNITS as usize);

/// Transposes one tile of 128 x 128 codes per cube.
#[cube(launch_unchecked)]
fn transpose_kernel<Q: Size>(
    codes: &[Vector<u32, Q>],
    transposed: &mut [Vector<u32, Q>],
    rows: u32,
    columns: u32,
) {
    let (rows, columns) = (rows as usize, columns as usize);
    let wide = columns.div_ceil(BLOCK);
    if CUBE_POS < rows.div_ceil(BLOCK) * wide {
        let (top, left) = (CUBE_POS / wide * BLOCK, CUBE_POS % wide * BLOCK);
        let (across, group) = (
            UNIT_POS as usize % LOADS_PER_ROW,
            UNIT_POS as usize / LOADS_PER_ROW,
        );
        let stride = columns.div_ceil(16);
        let at = left / 16 + across;
        let mut four = Array::<Vector<u32, Q>>::new(PATCH_ROWS);
        #[unroll]
        for row in 0..PATCH_ROWS {
            let from = top + group * PATCH_ROWS + row;
            let mut some = Vector::<u32, Q>::new(0u32);
            if from < rows && at < stride {
                some = codes[from * stride + at];
            }
            four[row] = some;
        }
        let mut staged = Shared::<[u32]>::new_slice(STAGED);
        #[unroll]
        for word in 0..4usize {
            let words = transposed_words(
                four[0].extract(word),
                four[1].extract(word),
                four[2].extract(word),
                four[3].extract(word),
            );
            let column = across * 16 + comptime!(word * 4);
            staged[staged_index(column, group)] = words.0;
            staged[staged_index(column + 1, group)] = words.1;
            staged[staged_index(column + 2, group)] = words.2;
            staged[staged_index(column + 3, group)] = words.3;
        }
        sync_cube();
        write_columns(&staged, transposed, top, left, rows, columns);
    }
}

/// Transposes codes whose rows are padded. A row has `depth` codes.
pub(super) fn transpose(codes: CubeTensor, depth: usize) -> CubeTensor {
    let client = codes.client.clone();
    let rows = codes.shape()[0];
    let transposed = empty(&codes, [depth, words(rows)], DType::U32);
    let cubes = rows.div_ceil(BLOCK) * depth.div_ceil(BLOCK);
    if cubes > 0 {
        // SAFETY: nothing outside of padded rows is read or written.
        unsafe {
            launch!(
                transpose_kernel,
                [client, cubes, UNITS],
                [4],
                [codes, &transposed],
                (rows as u32, depth as u32)
            );
        }
    }
    transposed
}

/// Writes one word of a padded row per unit.
#[cube(launch_unchecked)]
fn pad_kernel(flat: &[u32], padded: &mut [u32], rows: u32, depth: u32) {
    let depth = depth as usize;
    let stride = depth.div_ceil(16) * 4;
    let unit = CUBE_POS * comptime!(UNITS as usize) + UNIT_POS as usize;
    let (row, word) = (unit / stride, unit % stride);
    if row < rows as usize {
        let mut packed = 0u32;
        #[unroll]
        for code in 0..4usize {
            let column = word * 4 + code;
            if column < depth {
                let from = row * depth + column;
                let byte = (flat[from / 4] >> (8 * (from % 4) as u32)) & 0xff;
                packed |= byte << comptime!(8 * code as u32);
            }
        }
        padded[unit] = packed;
    }
}

/// Pads `rows` rows, which have `depth` codes each.
pub(super) fn pad(flat: CubeTensor, [rows, depth]: [usize; 2]) -> CubeTensor {
    let client = flat.client.clone();
    let padded = empty(&flat, [rows, words(depth)], DType::U32);
    let units = rows * words(depth);
    if units > 0 {
        // SAFETY: the codes were counted, and units past the rows access no memory.
        unsafe {
            launch!(
                pad_kernel,
                [client, units.div_ceil(UNITS as usize), UNITS],
                [],
                [flat, &padded],
                (rows as u32, depth as u32)
            );
        }
    }
    padded
}

/// Adds the AOT instances of both kernels.
pub(crate) fn aot_instances(list: &mut AotList) {
    instance!(
        list.streaming("fp8/transpose"), UNITS,
        transpose_kernel::TransposeKernel [_ _ _ _] (4)
    );
    instance!(list.other("fp8/pad"), UNITS, pad_kernel::PadKernel [_ _ _ _] ());
}
