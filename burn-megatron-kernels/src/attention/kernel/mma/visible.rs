//! The columns that are visible to the rows of a warp.

use cubecl::prelude::*;

use super::super::tile::{AttentionSizes, visible_end, visible_start};
use super::plan::MmaShape;
use crate::cube::mma::ptx::Quad;
use crate::cube::mma::swizzle::{lane_column, lane_row};

/// The visible columns of a warp's rows: `from..to` are visible to at least one row,
/// `all_from..all_to` to all rows.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct VisibleColumns {
    pub from: i32,
    pub to: i32,
    pub all_from: i32,
    pub all_to: i32,
}

/// Returns the visible columns of a warp's rows, which start at `first`, or no columns if there is
/// no such row. Starts and ends do not decrease from row to row.
#[cube]
pub(crate) fn visible_columns(
    first: usize,
    sizes: &AttentionSizes,
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    #[comptime] shape: MmaShape,
) -> VisibleColumns {
    let mask_range = &sizes.mask_range;
    let count = mask_range.rows as usize;
    let rows = comptime!(shape.warp_rows()).runtime();
    let (low, high) = (min(first, count - 1), min(first + rows, count) - 1);
    let to = visible_end(high as i32, mask_range, bounds);
    VisibleColumns {
        from: visible_start(low as i32, mask_range, bounds),
        to: select(first < count, to, 0i32),
        all_from: visible_start(high as i32, mask_range, bounds),
        all_to: visible_end(low as i32, mask_range, bounds),
    }
}

#[cube]
impl VisibleColumns {
    /// Returns whether the columns `at..at + columns` overlap the columns that are visible to some row.
    pub(crate) fn some(&self, at: i32, #[comptime] columns: usize) -> bool {
        at < self.to && at + columns as i32 > self.from
    }

    /// Returns whether all columns `at..at + columns` are visible to all rows.
    pub(crate) fn all(&self, at: i32, #[comptime] columns: usize) -> bool {
        at >= self.all_from && at + columns as i32 <= self.all_to
    }
}

/// Replaces the values of hidden columns. `first` is the first row of the warp and `at` the first
/// column.
#[cube]
pub(crate) fn mask(
    values: &mut Array<Vector<f32, Quad>>,
    replacement: f32,
    first: usize,
    at: i32,
    sizes: &AttentionSizes,
    bounds: &ComptimeOption<OwnedTensor<i32>>,
    #[comptime] shape: MmaShape,
) {
    let mask_range = &sizes.mask_range;
    let across = comptime!(shape.columns / 8);
    #[unroll]
    for row in 0..2 * shape.row_tiles {
        let line = min((first + lane_row(row) as usize) as i32, mask_range.rows - 1);
        let from = visible_start(line, mask_range, bounds);
        let to = visible_end(line, mask_range, bounds);
        #[unroll]
        for tile in 0..across {
            let index = comptime!(row / 2 * across + tile);
            let mut value = values[index];
            #[unroll]
            for place in 0..2usize {
                let column = at + lane_column() as i32 + comptime!((8 * tile + place) as i32);
                let element = comptime!(row % 2 * 2 + place);
                let is_visible = column >= from && column < to;
                value.insert(
                    element,
                    select(is_visible, value.extract(element), replacement),
                );
            }
            values[index] = value;
        }
    }
}
