//! The CubeCL kernels.

mod squares;
mod update;

pub(super) use squares::sum_of_squares;
pub(super) use update::update;

use crate::cube::instance::{AotInstance, AotTarget};

/// The AOT instances of the optimizer.
pub(crate) fn aot_instances(target: &AotTarget) -> Vec<AotInstance> {
    let mut all = update::aot_instances(target);
    all.extend(squares::aot_instances(target));
    all
}
