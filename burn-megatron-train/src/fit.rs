//! The training loop.

use super::clock::StepClock;
use super::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use super::step::{FinishedStep, LaunchedStep};
use super::{Observer, TrainError, TrainOutcome, Trainer};
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::all_finite;
use burn_megatron_data::{Dataset, Padding, Sampling};

impl<M: LanguageModel> Trainer<M> {
    /// Trains until the last step, or until an observer on any rank stops the run. After [`load`](Self::load), training
    /// continues from the step of the checkpoint. If the trainer has a [saver](Self::save_with), a checkpoint is also
    /// saved after the last step. Collective: call on all ranks of the world.
    ///
    /// If a run with a saver is stopped, its last evaluation is not reported to the observer, because a resumed run
    /// would not repeat this evaluation.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if the run fails on this rank. The other ranks then fail in their next collective.
    pub fn fit(
        &mut self,
        data: &dyn Dataset,
        observer: &mut dyn Observer,
    ) -> Result<TrainOutcome, TrainError> {
        self.bytes_per_token = data.bytes_per_token();
        let (plan, before) = (self.batch_plan(), self.position.samples);
        let ahead = self.steps()..self.config.steps.max(self.steps());
        let samples = data.training(&Sampling {
            seq: plan.sample_length(),
            seed: self.config.seed,
            samples: before + plan.samples_in(ahead.clone()),
        })?;
        let samples = plan.read_ahead(samples, ahead, before)?;
        let has_held_out = self.has_held_out(data)?;
        let (mut stopped, mut evaluated) = (false, None);
        let (mut steps, mut pending) = (self.steps(), None);
        let mut clock = StepClock::start();
        while steps < self.config.steps && !stopped {
            let stop = self.defers && observer.stop();
            let launched = self.launch(&samples, observer, pending.as_ref(), stop)?;
            clock.launch();
            steps += 1;
            if let Some(before) = pending.replace(launched) {
                stopped = self.report(before, &mut clock, observer)?;
            }
            let last = steps == self.config.steps;
            let is_due = |every: usize| steps.is_multiple_of(every);
            let evaluates = has_held_out && !last && self.config.evaluate_every.is_some_and(is_due);
            let saves = !last && self.is_save_due(steps as u64);
            // The following actions depend on whether the step was taken.
            if (!self.defers || last || stopped || evaluates || saves)
                && let Some(launched) = pending.take()
            {
                stopped |= self.report(launched, &mut clock, observer)?;
            }
            evaluated = if evaluates {
                Some(self.report_held_out(data, observer)?)
            } else {
                None
            };
            self.save_if(saves, observer)?;
            if evaluates || saves {
                clock = StepClock::start();
            }
            stopped = !last
                && if self.defers {
                    stopped
                } else {
                    !all_finite(!observer.stop(), self.ddp.groups())?
                };
            if stopped && let Some(launched) = pending.take() {
                self.report(launched, &mut clock, observer)?;
            }
        }
        tracing::debug!(waits = ?samples.stats(), "read ahead");
        self.save_final(observer)?;
        let held_out = match (evaluated, stopped && self.saver.is_some()) {
            (Some(held_out), _) => Some(held_out),
            (None, _) if !has_held_out => None,
            (None, true) => Some(self.evaluate_average(data)?),
            (None, false) => Some(self.report_held_out(data, observer)?),
        };
        let count = self.position.count;
        let mut outcome = TrainOutcome {
            padding: self.padding(plan.splits_steps())?,
            steps: self.steps(),
            skipped: count.skipped as usize,
            without_targets: count.without_targets as usize,
            spikes: count.spikes as usize,
            diverged: self.position.diverged,
            stopped,
            held_out,
            ..TrainOutcome::default()
        };
        self.hooks.outcome(&mut outcome);
        Ok(outcome)
    }

    /// Returns the padding on all ranks. Ranks of a context axis count the same padding, unless steps are split.
    fn padding(&self, splits_steps: bool) -> Result<Padding, TrainError> {
        let Padding { added, all } = self.position.padding;
        let own = vec![added as f64, all as f64];
        let sums = if splits_steps {
            self.sum_over_data(own)?
        } else {
            self.sum(own, self.ddp.groups().data())?
        };
        Ok(Padding {
            added: sums[0] as u64,
            all: sums[1] as u64,
        })
    }

    /// Returns whether there are held-out samples to evaluate on.
    fn has_held_out(&self, data: &dyn Dataset) -> Result<bool, TrainError> {
        let most = self.config.held_out_samples.min(1);
        Ok(most > 0 && !data.held_out(self.sequence_length(), most)?.is_empty())
    }

    fn report_held_out(
        &mut self,
        data: &dyn Dataset,
        observer: &mut dyn Observer,
    ) -> Result<HeldOutMetrics, TrainError> {
        let held_out = self.evaluate_average(data)?;
        observer.held_out(&held_out).map_err(TrainError::Observer)?;
        Ok(held_out)
    }

    /// Finishes a step and reports it to the observer. Returns whether any rank asked to stop the run.
    fn report(
        &mut self,
        launched: LaunchedStep,
        clock: &mut StepClock,
        observer: &mut dyn Observer,
    ) -> Result<bool, TrainError> {
        let FinishedStep {
            metrics,
            experts,
            stop,
        } = self.finish(launched)?;
        let timing = self.timing(&metrics, clock.lap());
        let reported = observer.step(&metrics, &timing);
        let reported = reported.and_then(|()| match &experts {
            Some(experts) => observer.experts(experts),
            None => Ok(()),
        });
        reported.map_err(TrainError::Observer)?;
        Ok(stop)
    }

    fn timing(&self, metrics: &StepMetrics, seconds: f64) -> StepTiming {
        let tokens_per_second = metrics.tokens as f64 / seconds;
        let length = self.batch_plan().row_length(metrics.step - 1);
        let flops = self.ddp.module().flops_per_token(length);
        StepTiming {
            step: metrics.step,
            seconds,
            tokens_per_second,
            flops_per_second: tokens_per_second * flops,
        }
    }
}
