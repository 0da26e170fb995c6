//! The CubeCL kernels.

mod outcome;
mod segments;
mod squares;
mod update;

pub(super) use outcome::step_outcome;
pub(super) use segments::largest_sums;
pub(super) use squares::sum_of_squares;
pub(super) use update::update;

use crate::cube::instance::{AotInstance, AotTarget};

/// The AOT instances of the optimizer.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = update::aot_instances(target);
    all.extend(squares::aot_instances(target));
    all.extend(segments::aot_instances(target));
    all.push(outcome::aot_instance(target));
    all
}
