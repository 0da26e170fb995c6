//! Tiles of 128 x 128 elements: their mapping to the units of a cube, and the transposition of their codes.
//!
//! A unit processes patches of 4 rows, so that 4 codes of a column form a word. To transpose a tile, these words go
//! through shared memory. A row of words in shared memory is a column of the tile.

use cubecl::prelude::*;

use crate::fp8::matrix::BLOCK;

/// The number of units per cube.
pub(crate) const UNITS: u32 = 256;

/// The number of rows per patch, which is the number of codes in a word.
pub(crate) const PATCH_ROWS: usize = 4;

/// The number of patches in a column of a tile.
pub(crate) const GROUPS: usize = BLOCK / PATCH_ROWS;

/// The number of shared memory words of a transposed tile.
pub(crate) const STAGED: usize = staged_index_of(BLOCK - 1, GROUPS);

const fn staged_index_of(column: usize, group: usize) -> usize {
    column * (GROUPS + 1) + column / 8 + group
}

/// Returns the index in shared memory of the word for a column and a group of 4 rows. Two gaps in the layout avoid bank
/// conflicts, both for the writes of adjacent units (columns 4 or 8 apart) and for the reads (adjacent words).
#[cube]
pub(crate) fn staged_index(column: usize, group: usize) -> usize {
    column * comptime!(GROUPS + 1) + column / 8 + group
}

/// Transposes the codes of 4 words, one word per row, to 4 words, one word per column. Pairs of words first exchange
/// bytes, and then halves.
#[cube]
pub(crate) fn transposed_words(
    first: u32,
    second: u32,
    third: u32,
    fourth: u32,
) -> (u32, u32, u32, u32) {
    let (even_low, odd_low) = interleaved(first, second);
    let (even_high, odd_high) = interleaved(third, fourth);
    (
        (even_low & 0xffff) | (even_high << 16),
        (odd_low & 0xffff) | (odd_high << 16),
        (even_low >> 16) | (even_high & 0xffff_0000),
        (odd_low >> 16) | (odd_high & 0xffff_0000),
    )
}

/// Returns two words: bytes 0 and 2 of both inputs, interleaved, and bytes 1 and 3 of both inputs, interleaved.
#[cube]
fn interleaved(one: u32, other: u32) -> (u32, u32) {
    (
        (one & 0x00ff_00ff) | ((other & 0x00ff_00ff) << 8),
        ((one >> 8) & 0x00ff_00ff) | (other & 0xff00_ff00),
    )
}

/// Writes a transposed tile to `[columns, rows]`, 16 codes at a time. `left` is the first column of the tile and `top`
/// is its first row. All units of the cube must call this function after a synchronization.
#[cube]
pub(crate) fn write_columns<Q: Size>(
    staged: &Shared<[u32]>,
    codes: &mut [Vector<u32, Q>],
    top: usize,
    left: usize,
    rows: usize,
    columns: usize,
) {
    let stride = rows.div_ceil(16);
    let quads = comptime!(GROUPS / 4);
    #[unroll]
    for step in 0..comptime!(BLOCK * GROUPS / 4 / UNITS as usize) {
        let at = UNIT_POS as usize + step * comptime!(UNITS as usize);
        let (column, quad) = (at / quads, at % quads);
        let to = top / 16 + quad;
        if left + column < columns && to < stride {
            let mut words = Vector::<u32, Q>::empty();
            #[unroll]
            for word in 0..4usize {
                words.insert(word, staged[staged_index(column, quad * 4 + word)]);
            }
            codes[(left + column) * stride + to] = words;
        }
    }
}
