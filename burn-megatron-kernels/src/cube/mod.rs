//! Shared code of the CubeCL kernels: launch layouts, autotuning, reductions over a row, tensor cores, and AOT
//! instances.

pub mod instance;
mod launch;
pub(crate) mod mma;
mod plan;
mod reduce;
mod tune;

pub(crate) use launch::{KernelTensor, launch};
#[cfg(test)]
pub(crate) use plan::with_reduction;
pub(crate) use plan::{
    Reduction, RowPlan, cube_device, empty, grid, matrix_sizes, output_over, own, upload,
};
pub(crate) use reduce::{cube_max, cube_sum, lane_max, lane_sum};
pub(crate) use tune::{Elementwise, Operation, SPLITS, Split, launch_tuned};
