//! Runs one training step: launches it on the device, then reads its results.

use burn::tensor::Tensor;

use super::expert_metrics::ExpertMetrics;
use super::hooks::{StepContext, StepDecision, StepInput, StepReport, StepRun, StepUpdate};
use super::losses::MeanLoss;
use super::metrics::{SkipReason, StepMetrics};
use super::{Observer, StepGradients, TrainError, Trainer};
use burn_megatron::data_parallel::Gradients;
use burn_megatron::device::failure;
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::{
    AdamWConfig, OutcomeSettings, ParallelAdamW, RankStatistics, StepReading, StepStatistics,
};
use burn_megatron_data::{Batch, Samples};

/// A step that is launched but not read yet.
pub(super) struct LaunchedStep {
    /// The index of the step, from 0.
    step: usize,
    micro_batches: usize,
    statistics: StepStatistics,
    /// The reason why a hook skips the step.
    skip: Option<SkipReason>,
}

impl<M: LanguageModel> Trainer<M> {
    /// Runs one training step: all micro-batches, the gradient reduction, clipping and the optimizer. `samples`
    /// contains the samples of the run, and the step reads the next samples from it. The only method of the observer
    /// that is called is [`gradients`](Observer::gradients). Collective: call on all ranks of the world.
    ///
    /// All ranks skip the update if a loss or a gradient is not finite on any rank, or if all targets of the global
    /// batch are masked. A step without targets does not change the loss scale.
    ///
    /// # Errors
    ///
    /// The errors of [`fit`](Self::fit).
    pub fn step(
        &mut self,
        samples: &dyn Samples,
        observer: &mut dyn Observer,
    ) -> Result<StepMetrics, TrainError> {
        let launched = self.launch(samples, observer, None, false)?;
        Ok(self.finish(launched)?.metrics)
    }

    /// Launches a complete step on the device: micro-batches, gradient reduction, clipping and the optimizer. `before`
    /// is the previous step if it is not [finished](Self::finish). Its outcome is then taken from the device. `stop` is
    /// whether this rank asks to stop the run.
    ///
    /// If readings are deferred, the host does not wait for the device, unless the observer reads the gradients.
    /// Otherwise the host reads the outcome before it launches the optimizer.
    pub(super) fn launch(
        &mut self,
        samples: &dyn Samples,
        observer: &mut dyn Observer,
        before: Option<&LaunchedStep>,
        stop: bool,
    ) -> Result<LaunchedStep, TrainError> {
        let step = self.steps() + usize::from(before.is_some());
        let _span = tracing::info_span!("step", step = step + 1).entered();
        self.ddp.groups().world().begin_step(step as u64 + 1);

        // The batches.
        let plan = self.batch_plan();
        let batches = plan.own_batches((step, self.position.samples), samples)?;
        self.runner.schedule(batches.len(), &self.ddp)?;
        self.position
            .read(plan.samples_in(step..step + 1), plan.padding(&batches));
        let input = StepInput {
            batches: &batches,
            step,
            data_rank: self.ddp.groups().data().rank(),
            loss_scale: self.device_loss_scale(before),
        };

        // Forwards, backwards and the reduction.
        let settings = self.outcome_settings(batches.len(), before);
        let (hooks, mut context) = self.split(step);
        let StepRun {
            gradients,
            losses,
            record,
        } = hooks.run(&mut context, &input)?;

        // The outcome.
        let own = RankStatistics {
            record,
            tokens: batches.iter().map(Batch::counted).sum(),
            losses: losses.losses.clone(),
            loss_count: losses.count,
            stop,
            added: hooks.statistics(&mut context)?.0,
        };
        let outcome = before.map(|before| before.statistics.outcome.clone());
        let statistics = StepStatistics::gather(own, &gradients, context.ddp, outcome, settings);
        let decision = StepDecision {
            input: &input,
            samples,
            losses: &losses.losses,
            gradients: &gradients,
            statistics: &statistics,
            skip: None,
        };
        let skip = hooks.decide(&mut context, decision)?;
        observe(&context, &statistics, &gradients, observer)?;

        // The update.
        let is_taken = || skip.is_none() && statistics.reading(context.ddp).is_taken();
        let update = StepUpdate {
            statistics: &statistics,
            skipped: skip.is_some(),
            launches: context.defers || is_taken(),
            by_outcome: context.optimizer.is_fused(),
        };
        hooks.before_update(&mut context, &update, &gradients)?;
        context.update(&update, gradients);
        hooks.after_update(&mut context, &update)?;
        Ok(LaunchedStep {
            step,
            micro_batches: batches.len(),
            statistics,
            skip,
        })
    }

    /// Reads a launched step and counts it. Steps must be finished in order.
    ///
    /// # Errors
    ///
    /// [`TrainError`] after too many consecutive skipped steps, or if the ranks used the parameters in different
    /// orders.
    pub(super) fn finish(&mut self, launched: LaunchedStep) -> Result<FinishedStep, TrainError> {
        let LaunchedStep {
            step,
            micro_batches,
            statistics,
            skip,
        } = launched;
        let reading = statistics.reading(&self.ddp);
        // The reading has waited for the tasks of the step.
        failure()?;
        reading.check_order(&self.ddp)?;
        let skip_reason = skip_reason(reading).or(skip);
        self.log_invalid(reading, step);
        let mean = MeanLoss::of_step(&self.ddp, micro_batches, reading);
        let scale = self.scaler.scale();
        let mut report = StepReport {
            metrics: StepMetrics {
                step: step + 1,
                loss: mean.loss,
                bits_per_byte: mean.bits_per_byte(self.bytes_per_token),
                minimised: mean.minimised,
                gradient_norm: reading.norm,
                learning_rate: self.position.learning_rate(0),
                tokens: reading.tokens,
                skipped: skip_reason.is_some(),
                skip_reason,
                loss_scale: (scale != 1.0).then_some(scale),
                ..StepMetrics::default()
            },
            experts: None,
            reading,
        };
        let (hooks, mut context) = self.split(step);
        hooks.metrics(&mut context, &mut report)?;
        // A step without targets gives no information about the loss scale.
        if skip_reason != Some(SkipReason::NoTargets) {
            self.scaler
                .update(skip_reason == Some(SkipReason::NotFinite));
        }
        self.position.record(skip_reason, mean.is_finite());
        self.optimizer.record_taken(self.position.count.taken);
        self.check_skips()?;
        Ok(FinishedStep {
            metrics: report.metrics,
            experts: report.experts,
            stop: reading.stop,
        })
    }

    /// Returns the loss scale on the device if the host has not read it yet, because it depends on the outcome of
    /// `before`.
    fn device_loss_scale(&self, before: Option<&LaunchedStep>) -> Option<Tensor<1>> {
        let before = before.filter(|_| self.scaler.state().is_some())?;
        let outcome = &before.statistics.outcome;
        let scales = Tensor::<1>::from_data(
            &self.loss_scales()[..],
            (&outcome.device(), outcome.dtype()),
        );
        let kind = outcome.clone().narrow(0, 0, 1).int();
        Some(scales.select(0, kind))
    }

    /// Returns the loss scale of the next step for three outcomes of this step: taken, not finite, and without targets.
    fn loss_scales(&self) -> [f64; 3] {
        let after = |overflow: bool| {
            let mut scaler = self.scaler.clone();
            scaler.update(overflow);
            scaler.scale()
        };
        [after(false), after(true), self.scaler.scale()]
    }

    fn outcome_settings(
        &self,
        micro_batches: usize,
        before: Option<&LaunchedStep>,
    ) -> OutcomeSettings {
        let numbers = |more: usize| {
            let (rate, taken) = (
                self.position.learning_rate(more),
                self.position.count.taken + more as u64,
            );
            // Other optimizers do not use these hyperparameters.
            let adamw = self.config.optimizer.adamw();
            ParallelAdamW::hyperparameters(adamw.unwrap_or(&AdamWConfig::default()), rate, taken)
        };
        OutcomeSettings {
            squares: self.runner.scheduled(micro_batches).squares.clone(),
            clip: self.config.clip,
            loss_scales: match before {
                Some(_) => self.loss_scales(),
                None => [self.scaler.scale(); 3],
            },
            steps: [numbers(usize::from(before.is_some())), numbers(0)],
        }
    }

    /// Logs invalid gradients. The first rank with an invalid gradient logs a warning. With a dynamic loss scale
    /// overflows are expected, so they are logged as debug messages.
    fn log_invalid(&self, reading: &StepReading, step: usize) {
        let step = step + 1;
        let is_first = reading.first_invalid == Some(self.ddp.groups().world().rank());
        for (number, culprit) in reading.invalid_gradients.iter().enumerate() {
            match self.scaler.state() {
                None if is_first && number == 0 => tracing::warn!(step, "{culprit}"),
                _ => tracing::debug!(step, "{culprit}"),
            }
        }
    }

    /// Returns an error after too many consecutive skipped steps.
    fn check_skips(&self) -> Result<(), TrainError> {
        let checked = self.position.count.check(self.config.skip_limit);
        checked.map_err(|skips| {
            let explained = self.hooks.explain_skips(self.steps(), &skips);
            explained.unwrap_or_else(|| self.position.skip_error(skips))
        })
    }
}

impl<M: LanguageModel> StepContext<'_, M> {
    /// Steps the optimizer, or drops the gradients of a skipped step. Collective: call on all ranks of the world.
    fn update(&mut self, update: &StepUpdate<'_>, mut gradients: Gradients) {
        if !update.launches {
            drop(gradients);
            self.ddp.finish_skipped_step();
        } else if update.by_outcome {
            let outcome = &update.statistics.outcome;
            self.optimizer
                .step_with_outcome(outcome, self.ddp, gradients);
        } else {
            gradients.scale(update.statistics.reading(self.ddp).factor);
            let rate = self.position.learning_rate(0);
            self.optimizer.step(rate, self.ddp, gradients);
        }
    }
}

/// Passes the reduced gradients to the observer.
fn observe<M: LanguageModel>(
    context: &StepContext<'_, M>,
    statistics: &StepStatistics,
    gradients: &Gradients,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    let ddp = &*context.ddp;
    let observed = StepGradients {
        step: context.step(),
        table: ddp.table(),
        reading: &|| statistics.reading(ddp),
        gather: &|| ddp.full_gradients_times(gradients, statistics.reading(ddp).unclipped),
    };
    observer.gradients(&observed).map_err(TrainError::Observer)
}

/// The results of a step once they are read.
pub(super) struct FinishedStep {
    pub metrics: StepMetrics,
    /// The load of the experts, if the model has experts.
    pub experts: Option<ExpertMetrics>,
    /// Whether any rank asked to stop the run.
    pub stop: bool,
}

fn skip_reason(reading: &StepReading) -> Option<SkipReason> {
    if reading.is_taken() {
        None
    } else if reading.is_without_targets() {
        Some(SkipReason::NoTargets)
    } else {
        Some(SkipReason::NotFinite)
    }
}
