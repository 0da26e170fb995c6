//! Counts the taken and the skipped steps, and limits the number of consecutive skipped steps.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

/// The numbers of taken and skipped steps of a run so far, which are saved in a checkpoint.
///
/// The learning rate of the next step depends on [`taken`](Self::taken), because a skipped step does not change the
/// weights and does not advance the learning rate schedule. The samples of the next step depend on
/// [`made`](Self::made), because the samples of a skipped step are not used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCount {
    /// The number of steps that updated the weights.
    pub taken: u64,
    /// The number of steps that did not update the weights.
    pub skipped: u64,
    /// The number of skipped steps since the last taken step. Steps without targets do not change this number.
    pub consecutive_skips: u64,
    /// The number of steps that were skipped because no token had a target. Older checkpoints do not contain this
    /// number.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub without_targets: u64,
    /// The number of steps that were skipped because their loss or gradient norm was a spike. Older checkpoints do not
    /// contain this number.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spikes: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The error for too many consecutive skipped steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the last {} steps were all skipped, after {} that were taken, because the loss or a gradient was not finite, or a \
     spike; the limit is {limit}: lower the learning rate or the initial loss scale",
    .count.consecutive_skips,
    .count.taken
)]
pub struct TooManySkips {
    /// The numbers of taken and skipped steps of the run.
    pub count: StepCount,
    /// The number of consecutive skipped steps at which the run ends.
    pub limit: NonZeroU64,
}

impl StepCount {
    /// The default limit of consecutive skipped steps. A dynamic loss scale with the default settings falls from 2^16
    /// to 1 in 17 skipped steps. The limit is about three times this number. A run that skips more steps does not
    /// recover.
    pub const DEFAULT_LIMIT: NonZeroU64 = NonZeroU64::new(50).unwrap();

    /// Counts a step. `taken` is false if the step was skipped.
    pub fn record(&mut self, taken: bool) {
        if taken {
            self.taken += 1;
            self.consecutive_skips = 0;
        } else {
            self.skipped += 1;
            self.consecutive_skips += 1;
        }
    }

    /// Counts a step that was skipped because none of its tokens has a target with a loss. The step does not count
    /// towards the limit of consecutive skipped steps.
    pub fn record_without_targets(&mut self) {
        self.skipped += 1;
        self.without_targets += 1;
    }

    /// Counts a step that was skipped because its loss or gradient norm was a spike.
    pub fn record_spike(&mut self) {
        self.record(false);
        self.spikes += 1;
    }

    /// Returns the total number of taken and skipped steps.
    pub fn made(&self) -> u64 {
        self.taken + self.skipped
    }

    /// Checks that the limit of consecutive skipped steps is not reached. All ranks with equal counts get the same
    /// result.
    ///
    /// # Errors
    ///
    /// [`TooManySkips`] as soon as `limit` consecutive steps were skipped. If the limit is 1, the first skipped step
    /// ends the run.
    pub fn check(&self, limit: NonZeroU64) -> Result<(), TooManySkips> {
        if self.consecutive_skips < limit.get() {
            return Ok(());
        }
        Err(TooManySkips {
            count: *self,
            limit,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::loss_scale::{LossScale, LossScaleConfig, LossScaler};

    fn counted(steps: &[bool]) -> StepCount {
        let mut count = StepCount::default();
        steps.iter().for_each(|taken| count.record(*taken));
        count
    }

    fn limit(limit: u64) -> NonZeroU64 {
        NonZeroU64::new(limit).expect("is above 0")
    }

    #[test]
    fn steps_are_counted() {
        assert_eq!(counted(&[]).made(), 0);
        let count = counted(&[true, false, false, true, true, false]);
        let expected = StepCount {
            taken: 3,
            skipped: 3,
            consecutive_skips: 1,
            without_targets: 0,
            spikes: 0,
        };
        assert_eq!((count, count.made()), (expected, 6));
    }

    #[test]
    fn steps_without_targets_neither_count_nor_reset() {
        let mut count = counted(&[true, false, false]);
        for _ in 0..9 {
            count.record_without_targets();
            assert_eq!(count.check(limit(3)), Ok(()));
        }
        assert_eq!((count.made(), count.without_targets), (12, 9));
        count.record(false);
        assert!(count.check(limit(3)).is_err());
        let saved = serde_json::to_string(&count).expect("is json");
        assert_eq!(
            serde_json::from_str::<StepCount>(&saved).expect("is a count"),
            count
        );
        let before = r#"{"taken":3,"skipped":2,"consecutive_skips":1}"#;
        let before: StepCount = serde_json::from_str(before).expect("of an older version");
        assert_eq!((before.made(), before.without_targets), (5, 0));
        assert!(
            !serde_json::to_string(&before)
                .expect("is json")
                .contains("without")
        );
    }

    /// A schedule that is indexed by the number of taken steps uses each rate once.
    #[test]
    fn a_skipped_step_does_not_advance_what_counts_taken_ones() {
        let steps = [true, false, false, true, false, true, true];
        let mut count = StepCount::default();
        let mut used = vec![];
        for taken in steps {
            if taken {
                used.push(count.taken);
            }
            count.record(taken);
        }
        assert_eq!(used, [0, 1, 2, 3]);
    }

    #[test]
    fn as_many_skips_in_a_row_as_the_limit_end_the_run() {
        let mut count = counted(&[true, false, false, true]);
        for _ in 0..2 {
            count.record(false);
            assert_eq!(count.check(limit(3)), Ok(()));
        }
        count.record(false);
        let error = count.check(limit(3)).expect_err("three in a row");
        insta::assert_snapshot!(
            error,
            @"the last 3 steps were all skipped, after 2 that were taken, because the loss or a gradient was not \
              finite, or a spike; the limit is 3: lower the learning rate or the initial loss scale"
        );
        count.record(true);
        assert_eq!(count.check(limit(1)), Ok(()));
        count.record(false);
        assert!(count.check(limit(1)).is_err());
    }

    #[test]
    fn the_default_limit_lets_a_dynamic_scale_reach_its_minimum() {
        let setting = LossScale::Dynamic(LossScaleConfig::default());
        let mut scaler = LossScaler::new(&setting).expect("the defaults fit");
        let mut count = StepCount::default();
        for _ in 0..17 {
            assert!(scaler.scale() > 1.0);
            scaler.update(true);
            count.record(false);
        }
        assert_eq!(scaler.scale(), 1.0);
        assert_eq!(count.check(StepCount::DEFAULT_LIMIT), Ok(()));
    }

    /// Consecutive skips are counted across a checkpoint.
    #[test]
    fn skips_in_a_row_are_counted_across_a_checkpoint() {
        let saved = serde_json::to_string(&counted(&[true, false, false])).expect("is json");
        let mut count: StepCount = serde_json::from_str(&saved).expect("is a count");
        count.record(false);
        assert!(count.check(limit(3)).is_err());
    }
}
