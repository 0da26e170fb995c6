//! The CubeCL kernels.

mod outcome;
mod segments;
mod squares;
mod update;

pub(super) use outcome::step_outcome;
pub(super) use segments::largest_sums;
pub(super) use squares::sum_of_squares;
pub(super) use update::update;

use crate::cube::instance::AotList;

/// Adds the AOT instances of the optimizer.
pub(crate) fn aot_instances(list: &mut AotList) {
    update::aot_instances(list);
    squares::aot_instances(list);
    segments::aot_instances(list);
    outcome::aot_instances(list);
}
