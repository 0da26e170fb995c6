//! Tiles of 128 x 128: how they lie over the units of a cube, and how their codes are turned.
//!
//! A unit takes patches of 4 rows, so that 4 codes of a column are one word. Columns go through
//! shared memory, where a row of words is a column of the tile.

use cubecl::prelude::*;

use super::reduce::UNITS;
use crate::fp8::BLOCK;

/// Rows of a patch: as many codes as are in a word.
pub(crate) const PATCH_ROWS: usize = 4;

/// Patches of a tile, one above the other.
pub(crate) const GROUPS: usize = BLOCK / PATCH_ROWS;

/// Words of shared memory that a turned tile takes.
pub(crate) const STAGED: usize = place_of(BLOCK - 1, GROUPS);

const fn place_of(column: usize, group: usize) -> usize {
    column * (GROUPS + 1) + column / 8 + group
}

/// Where the word of a column and a group of 4 rows stands in shared memory. The two gaps keep apart
/// what neighbouring units write (columns 4 or 8 apart) and what they read (neighbouring words).
#[cube]
pub(crate) fn place(column: usize, group: usize) -> usize {
    column * comptime!(GROUPS + 1) + column / 8 + group
}

/// The codes of 4 words, one of each row, as words of the 4 columns: bytes change places in pairs of
/// words, then halves do.
#[cube]
pub(crate) fn turned(first: u32, second: u32, third: u32, fourth: u32) -> (u32, u32, u32, u32) {
    let (even_low, odd_low) = paired(first, second);
    let (even_high, odd_high) = paired(third, fourth);
    (
        (even_low & 0xffff) | (even_high << 16),
        (odd_low & 0xffff) | (odd_high << 16),
        (even_low >> 16) | (even_high & 0xffff_0000),
        (odd_low >> 16) | (odd_high & 0xffff_0000),
    )
}

/// The bytes 0 and 2 of two words in turn, and the bytes 1 and 3.
#[cube]
fn paired(one: u32, other: u32) -> (u32, u32) {
    (
        (one & 0x00ff_00ff) | ((other & 0x00ff_00ff) << 8),
        ((one >> 8) & 0x00ff_00ff) | (other & 0xff00_ff00),
    )
}

/// Writes a turned tile to `[columns, rows]`, 16 codes at a time: `left` is its first column, `top`
/// its first row. All units must come here after a synchronisation.
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
                words.insert(word, staged[place(column, quad * 4 + word)]);
            }
            codes[(left + column) * stride + to] = words;
        }
    }
}
