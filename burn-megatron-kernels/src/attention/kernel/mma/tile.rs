//! Tiles of 16-bit rows in shared memory: loading, multiplying and storing them.

use cubecl::prelude::*;

use super::super::tile::{AttentionSizes, AttentionStrides, Block, HeadRows, head_rows};
use super::plan::MmaShape;
use crate::cube::mma::ptx::{
    Quad, copy_16_bytes, load_shared, multiply, pack, shared_address, store_shared,
};
use crate::cube::mma::swizzle::{
    column_lane, fragment, lane_column, lane_row, permutation, row_lane,
};
use crate::cube::mma::{CHUNK_BYTES, WARP};

/// Returns the address of a cube's tiles in shared memory.
#[cube]
pub(crate) fn tile_memory(#[comptime] shape: MmaShape) -> u32 {
    let quads = comptime!(shape.memory() / 16);
    let memory = Shared::<[Vector<u32, Quad>]>::new_aligned_slice(quads, 128usize);
    shared_address(&memory[0usize..1usize])
}

/// Starts to copy `rows` rows of a head, starting at row `first`, to the tile at `to`. Rows past
/// the last row are filled with zeros.
#[cube]
pub(crate) fn copy_tile<F: Float, N: Size>(
    from: &[Vector<F, N>],
    head: &HeadRows,
    first: usize,
    to: u32,
    #[comptime] rows: usize,
    #[comptime] shape: MmaShape,
) {
    let chunks = comptime!(shape.swizzle().chunks);
    let group = comptime!(shape.swizzle().group());
    let step = comptime!(shape.units() / group);
    let row = UNIT_POS / group as u32;
    let column = UNIT_POS % group as u32;
    let place = column ^ permutation(row, shape.swizzle());
    #[unroll]
    for part in 0..rows.div_ceil(step) {
        let at = row + comptime!((part * step) as u32);
        let mut is_inside = at < rows as u32;
        if comptime!((part + 1) * step <= rows) {
            is_inside = true;
        }
        if is_inside {
            // The unit copies its own chunk of the row, and then every chunk `group` units further.
            let source = first + at as usize;
            let start = head.start + source * head.stride + column as usize;
            let bytes = select(source < head.count, comptime!(CHUNK_BYTES as u32), 0u32);
            let target = to + (at * chunks as u32 + place) * comptime!(CHUNK_BYTES as u32);
            #[unroll]
            for index in 0..chunks / group {
                let chunk = start + comptime!(index * group);
                copy_16_bytes(
                    &from[chunk..chunk + 1],
                    target + comptime!((index * group * CHUNK_BYTES) as u32),
                    bytes,
                );
            }
        }
    }
}

/// The keys and values of a head, and the stages to which a kernel with resident queries copies their tiles.
#[derive(CubeType)]
pub(crate) struct KeyStages<'a, F: Float, N: Size> {
    k: &'a [Vector<F, N>],
    v: &'a [Vector<F, N>],
    k_rows: HeadRows,
    v_rows: HeadRows,
    stages: u32,
    #[cube(comptime)]
    shape: MmaShape,
}

#[cube]
impl<'a, F: Float, N: Size> KeyStages<'a, F, N> {
    pub(crate) fn new(
        k: &'a [Vector<F, N>],
        v: &'a [Vector<F, N>],
        strides: &AttentionStrides,
        queries: &Block,
        sizes: &AttentionSizes,
        stages: u32,
        #[comptime] shape: MmaShape,
    ) -> KeyStages<'a, F, N> {
        let group = queries.head / sizes.heads_per_group as usize;
        let keys = sizes.mask_range.columns as usize;
        KeyStages::<'a, F, N> {
            k,
            v,
            k_rows: head_rows(&strides.k, queries.batch, group, keys),
            v_rows: head_rows(&strides.v, queries.batch, group, keys),
            stages,
            shape,
        }
    }

    /// Returns the address of the tile of keys in the stage with this offset.
    pub(crate) fn key_tile(&self, stage: u32) -> u32 {
        self.stages + stage
    }

    /// Returns the address of the tile of values in the stage with this offset.
    pub(crate) fn value_tile(&self, stage: u32) -> u32 {
        self.stages + comptime!(self.shape.bytes(self.shape.columns) as u32) + stage
    }

    /// Starts to copy keys and their values, starting at key `at`, to a stage.
    pub(crate) fn copy(&self, at: i32, stage: u32) {
        let (at, columns) = (at as usize, comptime!(self.shape.columns));
        let (keys, values) = (self.key_tile(stage), self.value_tile(stage));
        let value_shape = comptime!(self.shape.of_values());
        copy_tile(self.k, &self.k_rows, at, keys, columns, self.shape);
        copy_tile(self.v, &self.v_rows, at, values, columns, value_shape);
    }
}

/// The rows of a resident tile that this warp owns.
#[derive(CubeType)]
pub(crate) struct Resident {
    /// The address of the first row in shared memory.
    pub start: u32,
    /// All fragments, if they stay in registers.
    fragments: Array<Vector<u32, Quad>>,
}

/// Returns this warp's rows of the resident tile at `tile`, which must be filled.
#[cube]
pub(crate) fn resident(tile: u32, #[comptime] shape: MmaShape) -> Resident {
    let warp = UNIT_POS / comptime!(WARP as u32);
    let start = tile + warp * comptime!(shape.bytes(shape.warp_rows()) as u32);
    let steps = comptime!(shape.width / 16);
    let kept = comptime!(if shape.in_registers {
        shape.row_tiles * steps
    } else {
        1
    });
    let mut fragments = Array::<Vector<u32, Quad>>::new(kept);
    if comptime!(shape.in_registers) {
        let lane = row_lane(start, shape.swizzle());
        #[unroll]
        for tile in 0..shape.row_tiles {
            #[unroll]
            for step in 0..steps {
                fragments[comptime!(tile * steps + step)] =
                    fragment(lane, comptime!(16 * tile), step, false, shape.swizzle());
            }
        }
    }
    Resident { start, fragments }
}

/// Computes the matrix product of this warp's rows with the transposed rows of the streamed tile at `tile`. The result
/// consists of 16 by 8 tiles in row-major order.
#[cube]
pub(crate) fn products(
    rows: &Resident,
    tile: u32,
    #[comptime] shape: MmaShape,
) -> Array<Vector<f32, Quad>> {
    let columns = column_lane(tile, shape.swizzle());
    let steps = comptime!(shape.width / 16);
    let across = comptime!(shape.columns / 8);
    let mut sums = Array::<Vector<f32, Quad>>::new(comptime!(shape.score_tiles()));
    #[unroll]
    for step in 0..steps {
        let mut left = Array::<Vector<u32, Quad>>::new(shape.row_tiles);
        #[unroll]
        for tile in 0..shape.row_tiles {
            if comptime!(shape.in_registers) {
                left[tile] = rows.fragments[comptime!(tile * steps + step)];
            } else {
                let lane = row_lane(rows.start, shape.swizzle());
                left[tile] = fragment(lane, comptime!(16 * tile), step, false, shape.swizzle());
            }
        }
        #[unroll]
        for pair in 0..across / 2 {
            let right = fragment(columns, comptime!(16 * pair), step, false, shape.swizzle());
            #[unroll]
            for tile in 0..shape.row_tiles {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(tile * across + 2 * pair + half);
                    sums[at] = multiply(left[tile], right, half, sums[at], shape.bf16);
                }
            }
        }
    }
    sums
}

/// Adds the matrix product of `weights`, rounded to 16 bits, and the rows of the streamed tile at `tile`.
#[cube]
pub(crate) fn accumulate(
    sums: &mut Array<Vector<f32, Quad>>,
    weights: &Array<Vector<f32, Quad>>,
    tile: u32,
    #[comptime] shape: MmaShape,
) {
    let rows = row_lane(tile, shape.swizzle());
    let across = comptime!(shape.columns / 8);
    let features = comptime!(shape.width / 8);
    #[unroll]
    for step in 0..across / 2 {
        let mut left = Array::<Vector<u32, Quad>>::new(shape.row_tiles);
        #[unroll]
        for tile in 0..shape.row_tiles {
            let at = comptime!(tile * across + 2 * step);
            left[tile] = operand(weights[at], weights[comptime!(at + 1)], shape);
        }
        #[unroll]
        for pair in 0..features / 2 {
            let right = fragment(rows, comptime!(16 * step), pair, true, shape.swizzle());
            #[unroll]
            for tile in 0..shape.row_tiles {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(tile * features + 2 * pair + half);
                    sums[at] = multiply(left[tile], right, half, sums[at], shape.bf16);
                }
            }
        }
    }
}

/// Returns two adjacent tiles of sums as the left operand of a matrix multiplication. A lane holds the same elements in
/// both layouts.
#[cube]
fn operand(
    first: Vector<f32, Quad>,
    second: Vector<f32, Quad>,
    #[comptime] shape: MmaShape,
) -> Vector<u32, Quad> {
    let mut packed = Vector::<u32, Quad>::new(0u32);
    #[unroll]
    for row in 0..2usize {
        let a = comptime!(2 * row);
        let b = comptime!(2 * row + 1);
        packed.insert(row, pack(first.extract(a), first.extract(b), shape.bf16));
        packed.insert(
            comptime!(row + 2),
            pack(second.extract(a), second.extract(b), shape.bf16),
        );
    }
    packed
}

/// Stores this warp's sums, with row `index` multiplied by `factors[index]`, to the rows of a head, starting at row
/// `first`. The sums are staged in the warp's rows of a resident tile, which is not read afterwards.
#[cube]
pub(crate) fn store<F: Float, N: Size>(
    sums: &Array<Vector<f32, Quad>>,
    factors: &Array<f32>,
    start: u32,
    to: &mut [Vector<F, N>],
    head: &HeadRows,
    first: usize,
    #[comptime] shape: MmaShape,
) {
    let features = comptime!(shape.width / 8);
    let pitch = comptime!((shape.swizzle().chunks * CHUNK_BYTES) as u32);
    sync_plane();
    #[unroll]
    for row in 0..2 * shape.row_tiles {
        let line = lane_row(row);
        let a = comptime!(row % 2 * 2);
        let b = comptime!(row % 2 * 2 + 1);
        #[unroll]
        for feature in 0..features {
            let tile = sums[comptime!(row / 2 * features + feature)];
            let value = pack(
                tile.extract(a) * factors[row],
                tile.extract(b) * factors[row],
                shape.bf16,
            );
            let chunk = comptime!(feature as u32) ^ permutation(line % 8, shape.swizzle());
            store_shared(
                start + line * pitch + chunk * comptime!(CHUNK_BYTES as u32) + lane_column() * 2,
                value,
            );
        }
    }
    sync_plane();
    let group = comptime!(shape.swizzle().group());
    let lane = UNIT_POS % comptime!(WARP as u32);
    #[unroll]
    for part in 0..shape.warp_rows() * group / WARP {
        let line = lane / group as u32 + comptime!((part * WARP / group) as u32);
        let column = lane % group as u32;
        let row = first + line as usize;
        let place = start
            + line * pitch
            + (column ^ permutation(line % 8, shape.swizzle())) * comptime!(CHUNK_BYTES as u32);
        if row < head.count {
            #[unroll]
            for index in 0..shape.swizzle().chunks / group {
                let chunk = comptime!(index * group);
                let value = load_shared(place + comptime!((chunk * CHUNK_BYTES) as u32));
                to[head.start + row * head.stride + column as usize + chunk] =
                    Vector::<F, N>::reinterpret(value);
            }
        }
    }
}

/// Stores this warp's sums in f32, with row `index` multiplied by `factors[index]`, or adds them to
/// the existing values. The rows of the head start at `first`, and their vectors are pairs. The
/// four lanes of a row write 32 adjacent bytes, so that no staging is needed.
#[cube]
pub(crate) fn store_sums<G: Float, M: Size>(
    sums: &Array<Vector<f32, Quad>>,
    factors: &Array<f32>,
    to: &mut [Vector<G, M>],
    head: &HeadRows,
    first: usize,
    #[comptime] add: bool,
    #[comptime] shape: MmaShape,
) {
    let features = comptime!(shape.width / 8);
    #[unroll]
    for row in 0..2 * shape.row_tiles {
        let line = first + lane_row(row) as usize;
        if line < head.count {
            let start = head.start + line * head.stride + (UNIT_POS % 4) as usize;
            #[unroll]
            for feature in 0..features {
                let tile = sums[comptime!(row / 2 * features + feature)];
                let mut pair = Vector::<G, M>::new(G::new(0.0));
                #[unroll]
                for place in 0..2usize {
                    let sum = tile.extract(comptime!(row % 2 * 2 + place)) * factors[row];
                    pair.insert(place, G::cast_from(sum));
                }
                let at = start + comptime!(4 * feature);
                if comptime!(add) {
                    pair += to[at];
                }
                to[at] = pair;
            }
        }
    }
}
