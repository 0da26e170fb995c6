//! The position of a run: its steps, its samples, and the learning rate.

use crate::metrics::SkipReason;
use crate::schedule::{LrSchedule, LrScheduleError};
use crate::{TrainConfig, TrainError};
use burn_megatron::optim::{StepCount, TooManySkips};
use burn_megatron_data::Padding;

/// The steps and the samples of a run so far.
pub(crate) struct RunPosition {
    pub count: StepCount,
    /// The number of samples trained on, with the samples of a launched step.
    pub samples: u64,
    /// See [`TrainOutcome::padding`](crate::TrainOutcome::padding), on this rank.
    pub padding: Padding,
    /// The number of steps at the last save or load.
    pub saved_at: u64,
    /// See [`TrainOutcome::diverged`](crate::TrainOutcome::diverged).
    pub diverged: Option<usize>,
    learning_rates: LrSchedule,
}

impl RunPosition {
    /// The start of a run.
    pub fn new(config: &TrainConfig) -> Result<Self, LrScheduleError> {
        Ok(Self {
            count: StepCount::default(),
            samples: 0,
            padding: Padding::default(),
            saved_at: 0,
            diverged: None,
            learning_rates: config.learning_rates()?,
        })
    }

    /// The number of finished steps.
    pub fn steps(&self) -> usize {
        self.count.made() as usize
    }

    /// The learning rate after `more` taken steps from here. Skipped steps do not advance the schedule.
    pub fn learning_rate(&self, more: usize) -> f64 {
        self.learning_rates.lr(self.count.taken as usize + more)
    }

    /// Counts samples and padding that a step reads.
    pub fn read(&mut self, samples: u64, padding: Padding) {
        self.samples += samples;
        self.padding = self.padding + padding;
    }

    /// Counts a step, with a loss that is finite or not.
    pub fn record(&mut self, skip: Option<SkipReason>, is_finite: bool) {
        let step = self.steps() + 1;
        match skip {
            // Without targets nothing is known about the run.
            Some(SkipReason::NoTargets) => return self.count.record_without_targets(),
            Some(SkipReason::Spike) => self.count.record_spike(),
            reason => self.count.record(reason.is_none()),
        }
        self.diverged = if is_finite {
            None
        } else {
            self.diverged.or(Some(step))
        };
    }

    /// The error of a run that skips too many consecutive steps.
    pub fn skip_error(&self, skips: TooManySkips) -> TrainError {
        match self.diverged {
            Some(step) => TrainError::Diverged { step, skips },
            None => skips.into(),
        }
    }
}
