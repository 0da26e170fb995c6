//! The mapping of rows to the units of cubes, and sums over a row with this mapping.

use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::prelude::*;

use crate::cube::{Reduction, RowPlan, cube_sum};

/// The launch parameters of a kernel with `lanes` units per row. A cube processes `units / lanes` rows at the same
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct RowLayout {
    /// The number of vectors per row.
    pub columns: usize,
    /// The number of units per cube.
    pub units: u32,
    /// The number of units per row, a power of two.
    pub lanes: u32,
    /// Whether a row stays in registers between its passes.
    pub in_registers: bool,
    /// Whether sums over a cube use plane operations.
    pub planes: bool,
    /// Whether the lanes of a row are in one plane, so that their values can be added by shuffles.
    pub shuffles: bool,
}

/// The register budget of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegisterBudget {
    /// The number of vectors per unit that short rows should have.
    pub wanted: usize,
    /// The maximum number of vectors of a row that is processed by one plane. Such rows need no synchronization of the
    /// cube.
    pub plane_columns: usize,
    /// The number of vectors of a row that a unit can keep in registers.
    pub in_registers: usize,
    /// The number of units per cube.
    pub units: u32,
}

/// The number of units of a row that is processed by one plane. It is also the maximum number of units per row if a
/// cube has several rows.
const PLANE_LANES: u32 = 32;
/// The number of units of the smallest cube.
const MIN_UNITS: u32 = 128;

impl RowLayout {
    /// Creates the layout for rows of `width` elements of `dtype`. Returns the layout and the vector size.
    pub(super) fn new(
        client: &Client,
        dtype: DType,
        width: usize,
        budget: RegisterBudget,
    ) -> (Self, usize) {
        let plan = RowPlan::new(client, dtype, width);
        let hardware = &client.properties().hardware;
        let most = budget.units.min(1 << hardware.max_units_per_cube.ilog2());
        let planes = plan.reduction == Reduction::Planes;
        let layout = Self::of(plan.columns, planes, hardware.plane_size_min, most, budget);
        (layout, plan.vector)
    }

    /// Creates the layout for rows of `columns` vectors. A cube has at most `most` units.
    pub(super) fn of(
        columns: usize,
        planes: bool,
        plane: u32,
        most: u32,
        budget: RegisterBudget,
    ) -> Self {
        let least = MIN_UNITS.min(most);
        let power = |count: usize| count.next_power_of_two().min(1 << 16) as u32;
        let lanes = if columns <= budget.plane_columns {
            power(columns).min(PLANE_LANES).min(most)
        } else {
            power(columns.div_ceil(budget.wanted)).clamp(least, most)
        };
        Self {
            columns,
            units: lanes.max(least),
            lanes,
            in_registers: columns.div_ceil(lanes as usize) <= budget.in_registers,
            planes,
            shuffles: planes && lanes <= plane,
        }
    }

    /// Returns whether a cube has a single row.
    pub(super) fn is_alone(&self) -> bool {
        self.lanes == self.units
    }

    /// Returns the number of rows per cube.
    pub(super) fn rows(&self) -> usize {
        (self.units / self.lanes) as usize
    }

    /// Returns the number of vectors of a row that each unit processes.
    pub(super) fn steps(&self) -> usize {
        self.columns.div_ceil(self.lanes as usize)
    }

    /// Returns whether all units of a row process the same number of vectors, and all rows of a cube exist if one of
    /// them exists.
    pub(super) fn is_whole(&self) -> bool {
        self.is_alone() && self.columns == self.steps() * self.lanes as usize
    }

    /// Returns the number of vectors of a row that a unit keeps in registers.
    pub(super) fn kept(&self) -> usize {
        if self.in_registers { self.steps() } else { 1 }
    }
}

/// Returns the sum of `value` over the units of a row. Every unit of the row gets the sum. All units of the cube must
/// call this function.
#[cube]
pub(super) fn row_sum(value: f32, #[comptime] layout: RowLayout) -> f32 {
    let lanes = comptime!(layout.lanes);
    if comptime!(layout.shuffles) {
        let mut sum = value;
        #[unroll]
        for step in 0..comptime!(lanes.ilog2()) {
            sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
        }
        sum
    } else if comptime!(layout.is_alone()) {
        cube_sum(value, layout.units, layout.planes)
    } else {
        let mut shared = Shared::<[f32]>::new_slice(comptime!(layout.units as usize));
        let lane = UNIT_POS % lanes;
        shared[UNIT_POS as usize] = value;
        sync_cube();
        let mut jump = comptime!(lanes / 2).runtime();
        while jump > 0 {
            if lane < jump {
                let other = shared[(UNIT_POS + jump) as usize];
                shared[UNIT_POS as usize] += other;
            }
            sync_cube();
            jump /= 2;
        }
        let sum = shared[(UNIT_POS - lane) as usize];
        sync_cube();
        sum
    }
}
