//! What the CubeCL kernels share: how a launch is laid out and tuned, and sums over a row.

mod plan;
mod reduce;
pub mod specimen;
mod tune;

#[cfg(test)]
pub(crate) use plan::with_reduction;
pub(crate) use plan::{Reduction, RowPlan, empty, grid, own};
pub(crate) use reduce::{cube_max, cube_sum, lane_max, lane_sum};
pub(crate) use tune::{Elementwise, Operation, SPLITS, Split, launch_tuned};
