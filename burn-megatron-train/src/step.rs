//! One step: launched on the device, then read.

use std::ops::Add;
use std::time::Instant;

use burn::tensor::Tensor;

use super::expert_metrics::{ExpertMetrics, LayerLoad};
use super::losses::{LossSums, MeanLoss};
use super::metrics::{SkipReason, StepMetrics};
use super::micro_batches::StepLosses;
use super::replay::{BadLoss, StepInput, StepRun};
use super::{Observer, ReplayError, StepGradients, TrainError, Trainer, Verdict};
use burn_megatron::device::failure;
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::moe::{ReportedLayer, reduced_reports};
use burn_megatron::optim::{
    AdamWConfig, OutcomeSettings, ParallelAdamW, RankStatistics, StepReading, StepStatistics,
    all_finite, count_zeros,
};
use burn_megatron_data::{Batch, Padding, Samples};

/// A step that is launched, and not read yet.
pub(super) struct LaunchedStep {
    /// Its index, from 0.
    step: usize,
    micro_batches: usize,
    statistics: StepStatistics,
    zeros: Option<u64>,
    /// Whether it is skipped as a spike.
    spike: bool,
}

impl<M: LanguageModel> Trainer<M> {
    /// Runs all of a step on the device: micro-batches, reduction, clipping and the optimizer. `before` is the step
    /// before if it is not [finished](Self::finish); its outcome is then taken from the device. `stop` is whether
    /// this rank asks to stop the run.
    ///
    /// If readings are deferred, the host does not wait for the device, unless the observer reads the gradients.
    /// Otherwise it reads the outcome before it launches the optimizer.
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
        let batches = self.batches(step, samples)?;
        self.schedule(batches.len())?;
        self.samples += self.sizes().of(step) as u64;
        let tokens = batches.iter().map(Batch::counted).sum();
        let padding = batches
            .iter()
            .filter(|batch| !self.is_counted_elsewhere(batch));
        self.padding = padding.map(Batch::padding).fold(self.padding, Padding::add);
        let loss_scale = self.device_loss_scale(before);
        self.begin_state();
        let input = StepInput {
            batches: &batches,
            step,
            data_rank: self.ddp.groups().data().rank(),
            loss_scale,
        };
        let fp8_before = self.checks_replay().then(|| self.ddp.fp8().snapshot());
        let StepRun {
            losses: StepLosses { losses, count },
            attention_logits,
            mut gradients,
            record,
        } = self.checked_run(&input)?;
        // Before the weights change: weights that are gathered in FP8 use the scales of the next step.
        let fp8 = self.ddp.fp8().end_step_on_device(self.ddp.groups())?;
        let routers = self.reduced_reports();
        let own = RankStatistics {
            record,
            tokens,
            losses: losses.clone(),
            loss_count: count,
            stop,
            fp8,
            routers,
            attention_logits,
        };
        let settings = self.outcome_settings(batches.len(), before);
        let outcome = before.map(|before| before.statistics.outcome.clone());
        let statistics = StepStatistics::gather(own, &gradients, &self.ddp, outcome, settings);
        let spike = self.is_spike(batches.len(), &statistics)?;
        if let Some(fp8) = &fp8_before
            && let Some(what) = self.bad_loss(&statistics, spike)
        {
            let bad = BadLoss {
                input: &input,
                losses: &losses,
                gradients: &gradients,
                fp8,
                what,
            };
            self.examine(&bad, samples)?;
        }
        // Not computed on the device where nothing needs it.
        let taken = || match statistics.taken() {
            taken if spike => taken.zeros_like(),
            taken => taken,
        };
        if let Some(reports) = &statistics.routers {
            let routers = self.ddp.routers();
            routers.update_biases(&self.routers, reports, &taken());
        }
        let observed = StepGradients {
            step: step + 1,
            table: self.ddp.table(),
            reading: &|| statistics.reading(&self.ddp),
            gather: &|| {
                let factor = statistics.reading(&self.ddp).unclipped;
                self.ddp.full_gradients_times(&gradients, factor)
            },
        };
        observer
            .gradients(&observed)
            .map_err(TrainError::Observer)?;
        let zeros = || count_zeros(&gradients, &self.ddp);
        let zeros = self.config.count_zeros.then(zeros).transpose()?;
        if self.defers || statistics.reading(&self.ddp).is_taken() && !spike {
            if let (Some(clip), Some(logits)) = (&self.qk_clip, &statistics.attention_logits) {
                let taken = self.defers.then(taken);
                self.ddp
                    .after_next_step(clip.change(logits, taken.as_ref()));
            }
            if self.optimizer.is_fused() {
                let (optimizer, ddp) = (&mut self.optimizer, &mut self.ddp);
                optimizer.step_with_outcome(&statistics.outcome, taken, ddp, gradients);
            } else {
                gradients.scale(statistics.reading(&self.ddp).factor);
                let rate = self.learning_rate(0);
                self.optimizer.step(rate, &mut self.ddp, gradients);
            }
        } else {
            drop(gradients);
            self.ddp.finish_skipped_step();
        }
        let every = self.config.check_replicas_every;
        if every.is_some_and(|every| (step + 1).is_multiple_of(every)) {
            self.ddp.check_replicas()?;
        }
        self.end_state();
        Ok(LaunchedStep {
            step,
            micro_batches: batches.len(),
            statistics,
            zeros,
            spike,
        })
    }

    /// Whether the padding of a micro-batch is counted by another rank of its group. Other ranks of a context axis count
    /// the same.
    fn is_counted_elsewhere(&self, batch: &Batch) -> bool {
        let shard = batch.shard.as_ref();
        self.hybrid_context.is_some() && shard.is_some_and(|shard| shard.rank() > 0)
    }

    /// Returns the fault of a step, if it has one that no loss scale explains.
    fn bad_loss(&self, statistics: &StepStatistics, spike: bool) -> Option<&'static str> {
        let reading = statistics.reading(&self.ddp);
        if spike {
            return Some("the loss or the norm of the gradients is a spike");
        }
        let is_bad = !reading.is_taken() && !reading.is_without_targets();
        (is_bad && self.scaler.state().is_none()).then_some("the loss or a gradient is not finite")
    }

    /// Whether a step that would be taken is a spike, on any rank; it is then in the window of those to come.
    fn is_spike(
        &mut self,
        micro_batches: usize,
        statistics: &StepStatistics,
    ) -> Result<bool, TrainError> {
        let Some(config) = self.config.skip_spikes else {
            return Ok(false);
        };
        let reading = statistics.reading(&self.ddp);
        if !reading.is_taken() {
            return Ok(false);
        }
        let (loss, norm) = (self.mean_loss(micro_batches, reading).loss, reading.norm);
        let own = self.spikes.is_spike(&config, loss, norm);
        self.spikes.push(&config, loss, norm);
        // Ranks that compute the same loss may round it differently.
        Ok(!all_finite(!own, self.ddp.groups())?)
    }

    /// Reads a launched step, and counts it. Steps are finished in order.
    ///
    /// # Errors
    ///
    /// [`TrainError`] after too many consecutive skipped steps, and if the ranks used the parameters in different
    /// orders.
    pub(super) fn finish(&mut self, launched: LaunchedStep) -> Result<FinishedStep, TrainError> {
        let LaunchedStep {
            step,
            micro_batches,
            statistics,
            zeros,
            spike,
        } = launched;
        let reading = statistics.reading(&self.ddp);
        // The reading has waited for the tasks of the step.
        failure()?;
        reading.check_order(&self.ddp)?;
        let skip_reason = skip_reason(reading).or(spike.then_some(SkipReason::Spike));
        self.log_invalid(reading, step);
        self.ddp
            .fp8()
            .warn_of_saturation(&reading.fp8, self.ddp.groups());
        let mean = self.mean_loss(micro_batches, reading);
        let scale = self.scaler.scale();
        let metrics = StepMetrics {
            step: step + 1,
            loss: mean.loss,
            bits_per_byte: mean.bits_per_byte(self.bytes_per_token),
            minimised: mean.minimised,
            gradient_norm: reading.norm,
            // Skipped steps do not advance the schedule.
            learning_rate: self.learning_rate(0),
            tokens: reading.tokens,
            skipped: skip_reason.is_some(),
            skip_reason,
            loss_scale: (scale != 1.0).then_some(scale),
            zeros,
            max_attention_logit: reading.attention_logits.iter().copied().reduce(f64::max),
        };
        match skip_reason {
            // Without targets nothing is known about the run or its loss scale.
            Some(SkipReason::NoTargets) => self.count.record_without_targets(),
            _ => {
                self.scaler
                    .update(skip_reason == Some(SkipReason::NotFinite));
                match skip_reason {
                    Some(SkipReason::Spike) => self.count.record_spike(),
                    reason => self.count.record(reason.is_none()),
                }
                self.diverged = if mean.is_finite() {
                    None
                } else {
                    self.diverged.or(Some(step + 1))
                };
            }
        }
        self.optimizer.record_taken(self.count.taken);
        self.check_skips()?;
        Ok(FinishedStep {
            metrics,
            experts: self.expert_metrics(step, reading),
            stop: reading.stop,
        })
    }

    /// The learning rate after `more` taken steps from here.
    fn learning_rate(&self, more: usize) -> f64 {
        self.learning_rates.lr(self.count.taken as usize + more)
    }

    /// The loss scale on the device, if the host does not know it: it depends on the outcome of `before`.
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

    /// The loss scale of the next step, if the present one is taken, is not finite, or has no targets.
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
            let (rate, taken) = (self.learning_rate(more), self.count.taken + more as u64);
            // Only AdamW reads the others.
            let adamw = self.config.optimizer.adamw();
            ParallelAdamW::hyperparameters(adamw.unwrap_or(&AdamWConfig::default()), rate, taken)
        };
        OutcomeSettings {
            squares: self.scheduled(micro_batches).squares.clone(),
            clip: self.config.clip,
            loss_scales: match before {
                Some(_) => self.loss_scales(),
                None => [self.scaler.scale(); 3],
            },
            steps: [numbers(usize::from(before.is_some())), numbers(0)],
        }
    }

    /// Returns the reports of the routers of all stages about the step; none in a model without experts.
    fn reduced_reports(&self) -> Option<Tensor<1>> {
        let world = self.ddp.groups().world();
        let (layers, device) = (&self.routers, &self.device);
        (!layers.is_empty()).then(|| reduced_reports(&self.router_step, layers, device, world))
    }

    /// The largest logits of the heads of all stages in the step; none where they are not measured.
    pub(super) fn reduced_logits(&self) -> Option<Tensor<1>> {
        let world = self.ddp.groups().world();
        let (layers, logits) = (&self.attention, self.ddp.attention_logits());
        (!layers.is_empty()).then(|| logits.end_step(layers, &self.device, world))
    }

    fn expert_metrics(&self, step: usize, reading: &StepReading) -> Option<ExpertMetrics> {
        let mut left = &reading.routers[..];
        let layer = |layer: &ReportedLayer| {
            let (own, rest) = left.split_at(layer.width());
            left = rest;
            let (load, losses) = own.split_at(layer.experts + 1);
            let (pairs, load) = (load[layer.experts], &load[..layer.experts]);
            let means = losses.iter().map(|sum| sum / reading.tokens as f64);
            LayerLoad {
                layer: layer.path.clone(),
                load: load.iter().map(|tokens| *tokens as u64).collect(),
                dropped: (pairs - load.iter().sum::<f64>()) as u64,
                losses: layer.losses.iter().copied().zip(means).collect(),
            }
        };
        let layers: Vec<_> = self.routers.iter().map(layer).collect();
        (!layers.is_empty()).then_some(ExpertMetrics {
            step: step + 1,
            layers,
        })
    }

    fn mean_loss(&self, micro_batches: usize, reading: &StepReading) -> MeanLoss {
        let terms = self.ddp.module().loss_terms();
        let of_rank = |losses: &[f64]| LossSums::of_rank(losses, micro_batches, terms).0;
        let sums = reading.losses(self.ddp.groups(), of_rank);
        LossSums(sums).over(reading.tokens as f64, terms)
    }

    /// The first rank with invalid gradients logs a warning; with a dynamic loss scale, which is found by
    /// overflows, only a debug message.
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
        let checked = self.count.check(self.config.skip_limit);
        checked.map_err(|skips| match self.diverged {
            _ if self.replay.is_bad_elsewhere => {
                let (step, verdict) = (self.steps(), Verdict::DataOrSoftware);
                let message = format!("{skips}; they are the same on another data-parallel rank");
                ReplayError {
                    step,
                    verdict,
                    message,
                }
                .into()
            }
            Some(step) => TrainError::Diverged { step, skips },
            None => skips.into(),
        })
    }
}

/// The results of a step once they are read.
pub(super) struct FinishedStep {
    pub metrics: StepMetrics,
    /// In a model with experts.
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

/// Measures the times of steps, from the end of one reading to the end of the next.
///
/// A device that runs a launched step before it answers a reading has then run both steps when the first is read. The
/// second, if it is read before another is launched, would take no time: it gets the mean of the steps since the start.
pub(super) struct StepClock {
    start: Instant,
    last: Instant,
    steps: u32,
    /// Whether a step was launched since the last reading.
    launched: bool,
}

impl StepClock {
    pub fn start() -> Self {
        let now = Instant::now();
        Self {
            start: now,
            last: now,
            steps: 0,
            launched: false,
        }
    }

    /// A step is launched.
    pub fn launch(&mut self) {
        self.launched = true;
    }

    /// The seconds of a step that has been read.
    pub fn lap(&mut self) -> f64 {
        let now = Instant::now();
        self.steps += 1;
        let time = if self.launched {
            now - self.last
        } else {
            (now - self.start) / self.steps
        };
        (self.last, self.launched) = (now, false);
        time.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_step_that_was_done_before_it_was_read_takes_as_long_as_the_others() {
        let mut clock = StepClock::start();
        let seconds = [200, 100, 100, 0].map(|wait| {
            if wait > 0 {
                clock.launch();
            }
            let ago = Duration::from_millis(wait);
            clock.last -= ago;
            clock.start -= ago;
            clock.lap()
        });
        for (seconds, expected) in seconds.into_iter().zip([0.2, 0.1, 0.1, 0.1]) {
            assert!((seconds - expected).abs() < 0.05, "{seconds} {expected}");
        }
    }
}
