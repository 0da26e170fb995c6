//! The kernel that computes the outcome of a step. One cube reads the statistics of all ranks.

use burn::backend::TensorMetadata;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::adamw::outcome::OutcomeRule;
use crate::adamw::outcome::columns::{LARGEST, SQUARES, TOKENS_HIGH, TOKENS_LOW, TOKENS_UNIT};
use crate::adamw::outcome::elements::{COUNT, DECAY, FACTOR, KIND, NORM, ROOT, SIZE, UNCLIPPED};
use crate::cube::instance::{AotList, instance};
use crate::cube::{RowPlan, cube_sum, empty, launch};
use crate::launch::exactly;

/// The number of units of the cube.
const UNITS: u32 = 256;

/// The bits of infinity. If the sign bit is cleared, the bits of NaN are larger than these bits.
const INFINITY: u32 = 0x7f80_0000;

/// Computes the outcome of a step.
///
/// `losses` is the index of the first loss column, and `limit` holds the bits of the largest valid sum of squares.
/// Hyperparameters whose name ends in `taken` apply if the previous step was taken.
#[cube(launch_unchecked)]
fn outcome_kernel(
    statistics: &[f32],
    before: &[f32],
    outcome: &mut [f32],
    count: u32,
    row: u32,
    losses: u32,
    limit: u32,
    clip: f32,
    unscale_taken: f32,
    unscale_not_finite: f32,
    unscale_no_targets: f32,
    size_taken: f32,
    size_skipped: f32,
    root_taken: f32,
    root_skipped: f32,
    decay_taken: f32,
    decay_skipped: f32,
    #[comptime] planes: bool,
) {
    let mut squares = 0.0f32;
    let mut high = 0.0f32;
    let mut low = 0.0f32;
    let mut invalid = 0.0f32;
    let mut at = UNIT_POS;
    while at < count {
        let value = statistics[at as usize];
        let bits = u32::reinterpret(value);
        let column = at % row;
        // Sums of squares are not negative. Non-negative floats have the same order as their bits, and NaN is the
        // largest.
        if column == comptime!(LARGEST as u32) && bits > limit {
            invalid += 1.0f32;
        }
        if column == comptime!(SQUARES as u32) || column == comptime!(SQUARES as u32 + 1) {
            squares += value;
        }
        if column == comptime!(TOKENS_HIGH as u32) {
            high += value;
        }
        if column == comptime!(TOKENS_LOW as u32) {
            low += value;
        }
        if column >= losses && (bits & 0x7fff_ffffu32) >= INFINITY {
            invalid += 1.0f32;
        }
        at += UNITS;
    }
    let squares = cube_sum(squares, UNITS, planes);
    let high = cube_sum(high, UNITS, planes);
    let low = cube_sum(low, UNITS, planes);
    let invalid = cube_sum(invalid, UNITS, planes);
    if UNIT_POS == 0 {
        let kind = before[KIND];
        let taken = kind == 0.0f32;
        let unscale_skipped = select(kind == 1.0f32, unscale_not_finite, unscale_no_targets);
        let unscale = select(taken, unscale_taken, unscale_skipped);
        let tokens = high * comptime!(TOKENS_UNIT as f32) + low;
        let unclipped = 1.0f32 / max(tokens, 1.0f32) * unscale;
        let norm = squares.sqrt() * unclipped;
        let mut factor = unclipped;
        if norm > clip {
            factor = unclipped * (clip / norm);
        }
        let finite = (u32::reinterpret(norm) & 0x7fff_ffffu32) < INFINITY;
        let mut found = 0.0f32;
        if !finite || invalid > 0.0f32 {
            found = 1.0f32;
        }
        if tokens == 0.0f32 {
            found = 2.0f32;
        }
        outcome[KIND] = found;
        outcome[FACTOR] = factor;
        outcome[SIZE] = select(taken, size_taken, size_skipped);
        outcome[ROOT] = select(taken, root_taken, root_skipped);
        outcome[DECAY] = select(taken, decay_taken, decay_skipped);
        outcome[NORM] = norm;
        outcome[UNCLIPPED] = unclipped;
    }
}

/// Computes the outcome; see [`step_outcome`](crate::adamw::step_outcome).
pub(in crate::adamw) fn step_outcome(inputs: Vec<CubeTensor>, rule: &OutcomeRule) -> CubeTensor {
    let [statistics, before] = exactly(inputs);
    let client = statistics.client.clone();
    let outcome = empty(&statistics, [COUNT], statistics.dtype);
    let count = statistics.shape().num_elements();
    let plan = RowPlan::new(&client, statistics.dtype, count);
    let [taken, skipped] = rule.scalars();
    let [unscale_taken, unscale_not_finite, unscale_no_targets] =
        rule.loss_scales.map(|scale| (1.0 / scale) as f32);
    unsafe {
        launch!(
            outcome_kernel,
            [client, 1, UNITS],
            [],
            [statistics, before, &outcome],
            (count as u32, rule.columns as u32, rule.losses as u32),
            (
                (rule.limit as f32).min(f32::MAX).to_bits(),
                rule.clip as f32
            ),
            (unscale_taken, unscale_not_finite, unscale_no_targets),
            (taken[0] as f32, skipped[0] as f32),
            (taken[1] as f32, skipped[1] as f32),
            (taken[2] as f32, skipped[2] as f32),
            (plan.planes())
        );
    }
    outcome
}

pub(super) fn aot_instances(list: &mut AotList) {
    instance!(
        list.other("step_outcome"), UNITS,
        outcome_kernel::OutcomeKernel [_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _] (true)
    );
}
