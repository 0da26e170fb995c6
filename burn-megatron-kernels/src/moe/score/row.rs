//! Computes the denominator of a row of logits in CubeCL kernels.

use cubecl::prelude::*;

use super::ScoreFunction;
use super::kernel::{is_softmax, least, numerator};
use crate::cube::{cube_max, cube_sum};

/// The values that scores with a common denominator share.
#[derive(CubeType, Clone, Copy)]
pub(in crate::moe) struct Denominator {
    /// The largest logit. Only a softmax uses it.
    pub largest: f32,
    /// The sum of the numerators.
    pub total: f32,
}

/// Computes the denominator of the `experts` logits that start at element `start`. All units of the cube must call this
/// function.
#[cube]
pub(in crate::moe) fn row_denominator<F: Float>(
    logits: &Tensor<F>,
    start: usize,
    experts: u32,
    #[comptime] score: ScoreFunction,
    #[comptime] units: u32,
    #[comptime] planes: bool,
) -> Denominator {
    let mut largest = 0.0f32;
    if comptime!(is_softmax(score)) {
        let mut own = f32::min_value();
        let mut expert = UNIT_POS;
        while expert < experts {
            own = max(own, f32::cast_from(logits[start + expert as usize]));
            expert += units;
        }
        largest = cube_max(own, units, planes);
    }
    let mut own = 0.0f32;
    let mut expert = UNIT_POS;
    while expert < experts {
        own += numerator(
            f32::cast_from(logits[start + expert as usize]),
            largest,
            score,
        );
        expert += units;
    }
    Denominator {
        largest,
        total: cube_sum(own, units, planes) + comptime!(least(score)),
    }
}
