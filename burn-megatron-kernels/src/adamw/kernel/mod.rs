//! The CubeCL kernels.

mod squares;
mod update;

pub(super) use squares::sum_of_squares;
pub(super) use update::update;

use crate::cube::specimen::{Specimen, Target};

/// Every kernel in every type.
pub(crate) fn specimens(target: &Target) -> Vec<Specimen> {
    let mut all = update::specimens(target);
    all.extend(squares::specimens(target));
    all
}
