//! The position of a run: steps, samples and learning rate.

use crate::metrics::SkipReason;
use crate::schedule::{LrSchedule, LrScheduleError};
use crate::{TrainConfig, TrainError};
use burn_megatron::optim::{StepCount, TooManySkips};
use burn_megatron_data::Padding;

/// The numbers of steps and samples of a run so far.
pub(crate) struct RunPosition {
    pub count: StepCount,
    /// The number of samples trained on, including the samples of a launched step.
    pub samples: u64,
    /// The padding on this rank: see [`TrainOutcome::padding`](crate::TrainOutcome::padding).
    pub padding: Padding,
    /// The number of steps at the last save or load.
    pub saved_at: u64,
    /// See [`TrainOutcome::diverged`](crate::TrainOutcome::diverged).
    pub diverged: Option<usize>,
    learning_rates: LrSchedule,
}

impl RunPosition {
    /// Returns the position at the start of a run.
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

    /// Returns the number of finished steps.
    pub fn steps(&self) -> usize {
        self.count.made() as usize
    }

    /// Returns the learning rate after `more` more taken steps. Skipped steps do not advance the schedule.
    pub fn learning_rate(&self, more: usize) -> f64 {
        self.learning_rates.lr(self.count.taken as usize + more)
    }

    /// Counts the samples and the padding of a step.
    pub fn read(&mut self, samples: u64, padding: Padding) {
        self.samples += samples;
        self.padding = self.padding + padding;
    }

    /// Counts a step. `is_finite` is whether its loss is finite.
    pub fn record(&mut self, skip: Option<SkipReason>, is_finite: bool) {
        let step = self.steps() + 1;
        match skip {
            // A step without targets gives no information about divergence.
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

    /// Returns the error of a run that skips too many consecutive steps.
    pub fn skip_error(&self, skips: TooManySkips) -> TrainError {
        match self.diverged {
            Some(step) => TrainError::Diverged { step, skips },
            None => skips.into(),
        }
    }
}
