//! The CPU implementation of delayed scaling.

use burn::backend::flex::FlexTensor;

use super::{LOG_COLUMNS, NOTHING, ScaleRule, ScaleRules};
use crate::cpu::{own, slice, slice_mut, vector};

/// Adds statistics to an entry of a log: the largest magnitude, and the number of saturated values. The statistics
/// cover `elements` values.
pub(in crate::fp8) fn log_entry(
    log: FlexTensor,
    slot: usize,
    [amax, beyond]: [f32; 2],
    elements: f32,
) -> FlexTensor {
    let mut log = own::<f32>(log);
    let entry = &mut slice_mut::<f32>(&mut log)[slot * LOG_COLUMNS..][..LOG_COLUMNS];
    entry[0] = larger(entry[0], amax);
    entry[1] += beyond;
    entry[2] += elements;
    log
}

/// Returns the larger of two magnitudes, or NaN if one of them is NaN. A negative number stands for a missing
/// magnitude.
fn larger(one: f32, other: f32) -> f32 {
    let key = |magnitude: f32| magnitude.to_bits() as i32;
    if key(one) < key(other) { other } else { one }
}

/// Returns the new state, an empty log, and the counts.
pub(super) fn next_scales(
    rules: &ScaleRules,
    logs: &FlexTensor,
    state: &FlexTensor,
) -> Vec<FlexTensor> {
    let (logs, old, slots) = (slice::<f32>(logs), slice::<f32>(state), rules.slots());
    let (mut state, mut counts) = (old.to_vec(), Vec::with_capacity(2 * slots));
    for (slot, rule) in rules.rules.iter().enumerate() {
        let ranks = logs.chunks(LOG_COLUMNS * slots);
        let entries = ranks.map(|log| &log[slot * LOG_COLUMNS..][..LOG_COLUMNS]);
        let [amax, beyond, elements] = entries.fold(NOTHING, |all, entry| {
            let amax = larger(all[0], entry[0]);
            [amax, all[1] + entry[1], all[2] + entry[2]]
        });
        counts.extend([beyond, elements]);
        if let Some(rule) = rule.filter(|_| amax.to_bits() as i32 >= 0) {
            let history = &mut state[rules.history(slot)];
            history.rotate_right(1);
            history[0] = amax;
            let scale = rule.scale(history);
            state[slot] = scale.unwrap_or(state[slot]);
        }
    }
    let log = NOTHING.repeat(slots);
    [state, log, counts].map(vector).into()
}

impl ScaleRule {
    /// Returns the new scale from the amax history, whose first element is the magnitude of this step. Returns `None`
    /// if the scale does not change.
    fn scale(&self, history: &[f32]) -> Option<f32> {
        if !history[0].is_finite() {
            return None;
        }
        let amax = if self.most_recent {
            history[0]
        } else {
            let finite = history.iter().filter(|amax| amax.is_finite());
            finite.copied().fold(0.0, f32::max)
        };
        (amax > 0.0).then(|| (self.numerator / amax).min(f32::MAX))
    }
}
