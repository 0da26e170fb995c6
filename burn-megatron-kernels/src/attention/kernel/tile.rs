//! Tiles in shared memory, and matrix multiplications of these tiles in registers.
//!
//! [`LANES`] adjacent units share a row. A unit computes a few consecutive rows of the resident tile, and every
//! [`LANES`]th column of each of these rows.

use cubecl::prelude::*;

/// The number of units that share a row.
pub(crate) const LANES: usize = 8;

/// Strides of the rows of a head, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct DeviceStrides {
    /// The offset of the first row of the first head of the first sequence.
    pub offset: u32,
    /// The stride between sequences.
    pub batch: u32,
    /// The stride between positions.
    pub row: u32,
    /// The stride between heads.
    pub head: u32,
}

/// The mask [`MaskRange`](super::super::mask::MaskRange) as a kernel argument. The columns
/// `row + shift - before ..= row + shift + after` are visible to `row`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct DeviceMaskRange {
    /// The position of row 0.
    pub shift: i32,
    /// The number of visible columns before the position of the row.
    pub before: i32,
    /// The number of visible columns after the position of the row.
    pub after: i32,
    /// The number of columns.
    pub columns: i32,
    /// The number of rows.
    pub rows: i32,
}

/// The strides of the inputs and of the output.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct AttentionStrides {
    pub q: DeviceStrides,
    pub k: DeviceStrides,
    pub v: DeviceStrides,
    pub out: DeviceStrides,
}

/// The sizes of a problem, and the mask for the rows of the resident tiles.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct AttentionSizes {
    pub mask_range: DeviceMaskRange,
    /// The factor that multiplies the scores.
    pub scale: f32,
    pub batches: u32,
    pub heads: u32,
    pub heads_per_group: u32,
}

/// The tile sizes of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TileShape {
    /// The number of rows of the resident tile. A cube processes these rows.
    pub rows: usize,
    /// The number of rows of a streamed tile. These rows are the columns of the scores.
    pub columns: usize,
    /// The number of rows per unit.
    pub own: usize,
    /// The number of vectors in a row of queries and keys in memory.
    pub width: usize,
    /// The number of vectors in a row of values and of the output in memory.
    pub value_width: usize,
    /// Whether lanes exchange values by plane operations.
    pub planes: bool,
}

impl TileShape {
    /// Returns the distance between rows in shared memory, in vectors. It is odd, so that lanes that read different
    /// rows read different banks.
    pub(crate) fn pitch(&self) -> usize {
        self.width.max(self.value_width).next_multiple_of(LANES) + 1
    }

    /// Returns the distance between rows of weights in shared memory.
    pub(crate) fn weight_pitch(&self) -> usize {
        self.columns + 1
    }

    /// Returns the number of units per cube.
    pub(crate) fn units(&self) -> usize {
        self.rows / self.own * LANES
    }

    /// Returns the number of shared memory words that lanes need to exchange values without plane operations.
    pub(crate) fn exchange(&self) -> usize {
        if self.planes {
            1
        } else {
            self.units() * self.own
        }
    }

    /// Returns the number of values per row that the backward pass keeps in shared memory.
    pub(crate) fn kept(&self) -> usize {
        4 * self.rows
    }

    /// Returns the number of score columns that a unit computes in each of its rows.
    pub(crate) fn columns_per_unit(&self) -> usize {
        self.columns / LANES
    }
}

/// Returns the number of vectors that a unit computes in a row of `width` vectors.
pub(crate) const fn vectors_per_unit(width: usize) -> usize {
    width.div_ceil(LANES)
}

/// The location of the rows of a head in memory, in vectors.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct HeadRows {
    /// The first row.
    pub start: usize,
    /// The stride between rows.
    pub stride: usize,
    /// The number of rows.
    pub count: usize,
}

/// Returns the rows of a head of one sequence.
#[cube]
pub(crate) fn head_rows(
    strides: &DeviceStrides,
    batch: usize,
    head: usize,
    count: usize,
) -> HeadRows {
    HeadRows {
        start: strides.offset as usize
            + batch * strides.batch as usize
            + head * strides.head as usize,
        stride: strides.row as usize,
        count,
    }
}

/// The rows of one head that a cube processes, and the range of columns that are visible to these rows.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Block {
    /// The first row.
    pub first: usize,
    pub batch: usize,
    pub head: usize,
    /// The start of the range of visible columns. The range extends from the first visible column of the first row to
    /// the last visible column of the last row.
    pub start: i32,
    pub end: i32,
}

/// Returns the number of blocks of `rows` rows in a launch over `heads` heads.
#[cube]
pub(crate) fn block_count(sizes: &AttentionSizes, heads: usize, #[comptime] rows: usize) -> usize {
    (sizes.mask_range.rows as usize).div_ceil(rows) * (sizes.batches as usize * heads)
}

/// Returns the block that this cube processes. With `backwards`, the last rows of all heads come first, because with
/// causal attention the last queries have the most keys.
#[cube]
pub(crate) fn block(
    sizes: &AttentionSizes,
    heads: usize,
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    #[comptime] backwards: bool,
    #[comptime] rows: usize,
) -> Block {
    let count = sizes.mask_range.rows as usize;
    let sequences = sizes.batches as usize * heads;
    let mut tile = CUBE_POS / sequences;
    if comptime!(backwards) {
        tile = count.div_ceil(rows) - 1 - tile;
    }
    let first = tile * rows;
    let last = min(first + rows, count) - 1;
    Block {
        first,
        batch: CUBE_POS % sequences / heads,
        head: CUBE_POS % sequences % heads,
        start: visible_start(first as i32, &sizes.mask_range, bounds),
        end: visible_end(last as i32, &sizes.mask_range, bounds),
    }
}

/// Returns the first column that is visible to `row`.
#[cube]
pub(crate) fn visible_start(
    row: i32,
    mask_range: &DeviceMaskRange,
    bounds: &ComptimeOption<OwnedTensor<i32>>,
) -> i32 {
    let start = max(row + mask_range.shift - mask_range.before, 0i32);
    #[comptime]
    match bounds {
        ComptimeOption::Some(bounds) => max(start, bounds.as_slice()[row as usize]),
        ComptimeOption::None => start,
    }
}

/// Returns the end of the columns that are visible to `row`.
#[cube]
pub(crate) fn visible_end(
    row: i32,
    mask_range: &DeviceMaskRange,
    bounds: &ComptimeOption<OwnedTensor<i32>>,
) -> i32 {
    let past = row + mask_range.shift + mask_range.after + 1;
    let end = min(past, mask_range.columns);
    #[comptime]
    match bounds {
        ComptimeOption::Some(bounds) => {
            min(end, bounds.as_slice()[(row + mask_range.rows) as usize])
        }
        ComptimeOption::None => end,
    }
}

/// The visible range of each row of a block, kept in shared memory to save registers.
#[derive(CubeType)]
pub(crate) struct VisibleRanges {
    lows: Shared<[i32]>,
    highs: Shared<[i32]>,
}

#[cube]
impl VisibleRanges {
    pub(crate) fn new(
        first: usize,
        sizes: &AttentionSizes,
        bounds: &ComptimeOption<OwnedTensor<i32>>,
        #[comptime] shape: TileShape,
    ) -> VisibleRanges {
        let mut lows = Shared::<[i32]>::new_slice(shape.rows);
        let mut highs = Shared::<[i32]>::new_slice(shape.rows);
        let row = UNIT_POS as usize;
        if row < shape.rows {
            let at = min((first + row) as i32, sizes.mask_range.rows - 1);
            lows[row] = visible_start(at, &sizes.mask_range, bounds);
            highs[row] = visible_end(at, &sizes.mask_range, bounds);
        }
        VisibleRanges { lows, highs }
    }

    /// Returns whether a column is visible to a row of the block.
    pub(crate) fn contains(&self, row: usize, column: i32) -> bool {
        column >= self.lows[row] && column < self.highs[row]
    }
}

/// Rows of a head in shared memory.
#[derive(CubeType)]
pub(crate) struct Tile<N: Size> {
    vectors: Shared<[Vector<f32, N>]>,
    #[cube(comptime)]
    rows: usize,
    #[cube(comptime)]
    shape: TileShape,
}

#[cube]
impl<N: Size> Tile<N> {
    pub(crate) fn new(#[comptime] rows: usize, #[comptime] shape: TileShape) -> Tile<N> {
        let vectors = Shared::<[Vector<f32, N>]>::new_slice(comptime!(rows * shape.pitch()));
        Tile::<N> {
            vectors,
            rows,
            shape,
        }
    }

    /// Loads rows of a head, which have `width` vectors, and multiplies them by `factor`. The rows start at `first`.
    /// Elements after the last row or after the width become zeros.
    pub(crate) fn load<F: Float>(
        &mut self,
        from: &[Vector<F, N>],
        head: &HeadRows,
        first: usize,
        factor: f32,
        #[comptime] width: usize,
    ) {
        let pitch = comptime!(self.shape.pitch());
        let columns = comptime!(self.shape.pitch() - 1);
        let units = comptime!(self.shape.units());
        let cells = comptime!(self.rows * (self.shape.pitch() - 1));
        let mut at = UNIT_POS as usize;
        while at < cells {
            let row = at / columns;
            let column = at % columns;
            let mut value = Vector::<f32, N>::new(0.0);
            if first + row < head.count && column < width {
                let read = from[head.start + (first + row) * head.stride + column];
                value = Vector::<f32, N>::cast_from(read) * Vector::new(factor);
            }
            self.vectors[row * pitch + column] = value;
            at += units;
        }
    }
}

/// Returns the dot products of the unit's rows of `resident` with its rows of `streamed`, which are its columns of the
/// scores. Both tiles have rows of `width` vectors.
#[cube]
pub(crate) fn dots<N: Size>(
    resident: &Tile<N>,
    streamed: &Tile<N>,
    #[comptime] width: usize,
    #[comptime] shape: TileShape,
) -> Array<f32> {
    let pitch = comptime!(shape.pitch());
    let own = comptime!(shape.own);
    let columns = comptime!(shape.columns_per_unit());
    let lane = UNIT_POS as usize % LANES;
    let row = UNIT_POS as usize / LANES * own;
    let mut sums = Array::<f32>::new(comptime!(own * columns));
    #[unroll]
    for i in 0..own * columns {
        sums[i] = 0.0f32;
    }
    for k in 0..width {
        let mut left = Array::<Vector<f32, N>>::new(own);
        #[unroll]
        for r in 0..own {
            left[r] = resident.vectors[(row + r) * pitch + k];
        }
        #[unroll]
        for c in 0..columns {
            let right = streamed.vectors[(lane + c * LANES) * pitch + k];
            #[unroll]
            for r in 0..own {
                #[unroll]
                for n in 0..N::value() {
                    let i = comptime!(r * columns + c);
                    sums[i] = fma(left[r].extract(n), right.extract(n), sums[i]);
                }
            }
        }
    }
    sums
}

/// Adds the matrix product of the unit's rows of `weights` and its vectors of the rows of `streamed`, which have
/// `width` vectors.
#[cube]
pub(crate) fn accumulate<N: Size>(
    weights: &Shared<[f32]>,
    streamed: &Tile<N>,
    sums: &mut Array<Vector<f32, N>>,
    #[comptime] width: usize,
    #[comptime] shape: TileShape,
) {
    let pitch = comptime!(shape.pitch());
    let weight_pitch = comptime!(shape.weight_pitch());
    let own = comptime!(shape.own);
    let vectors_per_unit = comptime!(vectors_per_unit(width));
    let lane = UNIT_POS as usize % LANES;
    let row = UNIT_POS as usize / LANES * own;
    for j in 0..shape.columns {
        let mut right = Array::<Vector<f32, N>>::new(vectors_per_unit);
        #[unroll]
        for t in 0..vectors_per_unit {
            right[t] = streamed.vectors[j * pitch + lane + t * LANES];
        }
        #[unroll]
        for r in 0..own {
            let weight = Vector::<f32, N>::new(weights[(row + r) * weight_pitch + j]);
            #[unroll]
            for t in 0..vectors_per_unit {
                let i = comptime!(r * vectors_per_unit + t);
                sums[i] = fma(weight, right[t], sums[i]);
            }
        }
    }
}

/// Returns registers with zeros for the unit's vectors of its rows. The rows have `width` vectors.
#[cube]
pub(crate) fn zeros<N: Size>(
    #[comptime] width: usize,
    #[comptime] shape: TileShape,
) -> Array<Vector<f32, N>> {
    let count = comptime!(shape.own * vectors_per_unit(width));
    let mut sums = Array::<Vector<f32, N>>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = Vector::new(0.0);
    }
    sums
}

/// Returns `count` registers set to `value`.
#[cube]
pub(crate) fn filled(value: f32, #[comptime] count: usize) -> Array<f32> {
    let mut values = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        values[i] = value;
    }
    values
}

/// Writes the unit's vectors of its rows, or adds them to the existing values. The rows have `width` vectors, and
/// `first` is the first row of the tile.
#[cube]
pub(crate) fn store<F: Float, N: Size>(
    sums: &Array<Vector<f32, N>>,
    factors: &Array<f32>,
    to: &mut [Vector<F, N>],
    head: &HeadRows,
    first: usize,
    #[comptime] add: bool,
    #[comptime] width: usize,
    #[comptime] shape: TileShape,
) {
    let own = comptime!(shape.own);
    let vectors_per_unit = comptime!(vectors_per_unit(width));
    let lane = UNIT_POS as usize % LANES;
    let row = first + UNIT_POS as usize / LANES * own;
    #[unroll]
    for r in 0..own {
        #[unroll]
        for t in 0..vectors_per_unit {
            let column = lane + t * LANES;
            if row + r < head.count && column < width {
                let at = head.start + (row + r) * head.stride + column;
                let mut value = sums[comptime!(r * vectors_per_unit + t)] * Vector::new(factors[r]);
                if comptime!(add) {
                    value += Vector::cast_from(to[at]);
                }
                to[at] = Vector::cast_from(value);
            }
        }
    }
}

/// Reduces the values of each row over its lanes to their maximum or their sum. Every lane gets the result. All units
/// of the cube must call this function.
#[cube]
pub(crate) fn reduce_lanes(
    values: &mut Array<f32>,
    exchange: &mut Shared<[f32]>,
    #[comptime] sum: bool,
    #[comptime] shape: TileShape,
) {
    let own = comptime!(shape.own);
    if comptime!(shape.planes) {
        #[unroll]
        for r in 0..own {
            #[unroll]
            for step in 0..3u32 {
                let other = plane_shuffle_xor(values[r], comptime!(1u32 << step));
                if comptime!(sum) {
                    values[r] += other;
                } else {
                    values[r] = max(values[r], other);
                }
            }
        }
    } else {
        let unit = UNIT_POS as usize;
        #[unroll]
        for r in 0..own {
            exchange[unit * own + r] = values[r];
        }
        sync_cube();
        let first = unit / LANES * LANES;
        #[unroll]
        for r in 0..own {
            let mut all = exchange[first * own + r];
            for lane in 1..LANES {
                let other = exchange[(first + lane) * own + r];
                if comptime!(sum) {
                    all += other;
                } else {
                    all = max(all, other);
                }
            }
            values[r] = all;
        }
        sync_cube();
    }
}
