//! The CPU implementation of the transposition and the padding of codes.

use super::words;
use crate::cpu::{for_each_task, rows_per_task};

/// The number of rows and of codes per tile. Both the source and the result stay in the L1 cache.
const TILE: usize = 64;

/// Returns the code at a position of a row.
#[inline(always)]
fn code(row: &[u32], at: usize) -> u32 {
    (row[at / 4] >> (8 * (at % 4))) & 0xff
}

/// Transposes codes `[rows, depth]` with padded rows to `[depth, rows]`.
pub(in super::super) fn transposed_codes(codes: &[u32], [rows, depth]: [usize; 2]) -> Vec<u32> {
    let [from, to] = [words(depth), words(rows)];
    let mut turned = vec![0u32; depth * to];
    let band = |first: usize, turned: &mut [u32]| {
        for top in (0..rows).step_by(TILE) {
            for (row, turned) in turned.chunks_exact_mut(to).enumerate() {
                let places = (top..rows.min(top + TILE)).step_by(4);
                for (word, at) in turned[top / 4..].iter_mut().zip(places) {
                    let four = (at..rows.min(at + 4)).rev();
                    let column = first + row;
                    *word = four.fold(0, |word, at| {
                        word << 8 | code(&codes[at * from..][..from], column)
                    });
                }
            }
        }
    };
    // The bands are narrow, so that the rows of codes that a tile reads stay in the cache.
    let high = (rows_per_task(rows) / TILE).max(1) * TILE;
    let length = (high * to).max(1);
    let bands = turned.chunks_mut(length).enumerate();
    for_each_task(bands, |(number, turned)| band(number * high, turned));
    turned
}

/// Pads `rows` rows, which have `depth` codes each.
pub(super) fn padded(codes: &[u32], [rows, depth]: [usize; 2]) -> Vec<u32> {
    let stride = words(depth);
    let mut all = vec![0u32; rows * stride];
    let lines = all.chunks_exact_mut(stride.max(1)).enumerate();
    for (row, words) in lines {
        for at in 0..depth {
            words[at / 4] |= code(codes, row * depth + at) << (8 * (at % 4));
        }
    }
    all
}
