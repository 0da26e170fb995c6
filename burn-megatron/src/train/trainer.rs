//! The training loop of one rank.

use std::ops::Range;
use std::time::Instant;

use burn::tensor::Device;

use super::config::{ConfigError, TrainConfig};
use super::error::TrainError;
use super::losses::LossSums;
use super::metrics::{HeldOutMetrics, SkipReason, StepMetrics, StepTiming};
use super::micro_batches::matrix;
use super::schedule::LrSchedule;
use super::{LanguageModel, Observer, Saver};
use crate::collective::Comm;
use crate::comm::{Buffer, CommError, Groups, ReduceOp};
use crate::data::{Batch, Dataset, Samples, Sampling};
use crate::data_parallel::{DistributedDataParallel, Gradients, ZeroStage};
use crate::generate::{GenerateConfig, GenerateError, Generated, Generator};
use crate::mesh::Axis;
use crate::nn::ParallelModule;
use crate::optim::{LossScaler, ParallelAdamW, StepCount, all_finite, count_zeros, global_norm};
use crate::pipeline::engine::{Event, PutOff};
use crate::pipeline::schedule::Schedule;
use crate::tokenizer::Tokenizer;

/// Trains one rank's part of a model; every rank of the mesh has one.
pub struct Trainer<M> {
    pub(super) ddp: DistributedDataParallel<M>,
    pub(super) optimizer: ParallelAdamW,
    pub(super) scaler: LossScaler,
    pub(super) count: StepCount,
    learning_rates: LrSchedule,
    pub(super) config: TrainConfig,
    pub(super) device: Device,
    /// In which order the ranks of the pipeline work, where there are several.
    pub(super) schedule: Option<Schedule>,
    pub(super) put_off: Option<PutOff>,
    /// What this rank did in the last step of a pipeline.
    events: Vec<Event>,
    /// Of the data that it is trained on; 1 where that is not known.
    bytes_per_token: f64,
    /// The samples that were trained on.
    pub(super) samples: u64,
    pub(super) saver: Option<Saver>,
    /// The steps that had been made when it was saved or loaded last.
    pub(super) saved_at: u64,
    /// See [`Outcome::diverged`].
    diverged: Option<usize>,
}

/// How the ranks of a pipeline work together.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// In which order they work.
    pub schedule: Schedule,
    /// How many gradients of the output layer's weight the last stage puts off to its cool-down at
    /// once: 0 puts off all, nothing puts off none. For schedules whose backward is one action.
    pub defer_embedding_wgrad: Option<usize>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// The steps that were made, skipped ones and those before a checkpoint among them.
    pub steps: usize,
    /// The steps of these that no rank took, as a loss or a gradient was not finite, or as they had no
    /// targets.
    pub skipped: usize,
    /// The skipped steps that had no targets.
    pub without_targets: usize,
    /// The step, from 0, from which on no loss was finite, where the last one was not either.
    pub diverged: Option<usize>,
    /// Whether it was stopped before its last step.
    pub stopped: bool,
    /// Held-out loss at the end.
    pub held_out: HeldOutMetrics,
}

impl Outcome {
    /// Whether the loss is not finite at the end: that of the last step, or that of the held-out text.
    pub fn has_diverged(&self) -> bool {
        let held_out = &self.held_out;
        self.diverged.is_some() || held_out.tokens > 0 && !held_out.loss.is_finite()
    }
}

impl<M: LanguageModel> Trainer<M> {
    /// A trainer of `model` on `device`.
    ///
    /// # Errors
    ///
    /// [`TrainError`] when the settings do not fit the mesh or the model.
    pub fn new(
        model: ParallelModule<M>,
        groups: &Groups,
        device: &Device,
        config: &TrainConfig,
    ) -> Result<Self, TrainError> {
        match groups.mesh().size(Axis::Pipeline) {
            1 => Self::build(model, groups, device, config, None, None),
            ranks => Err(TrainError::NoSchedule(ranks)),
        }
    }

    /// A trainer of the stages of `model` that lie on this rank.
    ///
    /// # Errors
    ///
    /// [`TrainError`] when the settings do not fit the mesh, the model or the schedule.
    pub fn with_pipeline(
        model: ParallelModule<M>,
        groups: &Groups,
        device: &Device,
        config: &TrainConfig,
        pipeline: Pipeline,
    ) -> Result<Self, TrainError> {
        let Pipeline {
            schedule,
            defer_embedding_wgrad,
        } = pipeline;
        let share = config.global_batch_size / groups.mesh().size(Axis::Data);
        let micro_batches = share / config.micro_batch_size.max(1);
        if schedule.micro_batches() != micro_batches {
            let schedule = schedule.micro_batches();
            return Err(TrainError::MicroBatches {
                schedule,
                micro_batches,
            });
        }
        let last = schedule.rank_of(schedule.stages() - 1) == groups.pipeline().rank();
        let index = model
            .table
            .index(model.module.output_weight())
            .filter(|_| last);
        let put_off = index.zip(defer_embedding_wgrad);
        let put_off = put_off.map(|(index, limit)| PutOff { index, limit });
        Self::build(model, groups, device, config, Some(schedule), put_off)
    }

    fn build(
        model: ParallelModule<M>,
        groups: &Groups,
        device: &Device,
        config: &TrainConfig,
        schedule: Option<Schedule>,
        put_off: Option<PutOff>,
    ) -> Result<Self, TrainError> {
        config.check(groups.mesh().size(Axis::Data), model.module.context())?;
        let ddp = DistributedDataParallel::with(model, groups, &config.data_parallel)?;
        Ok(Self {
            optimizer: ParallelAdamW::new(&config.optimizer, &ddp)?,
            scaler: LossScaler::new(&config.loss_scale()).map_err(ConfigError::from)?,
            count: StepCount::default(),
            learning_rates: config.learning_rates().map_err(ConfigError::from)?,
            ddp,
            config: config.clone(),
            device: device.clone().inner(),
            schedule,
            put_off,
            events: vec![],
            bytes_per_token: 1.0,
            samples: 0,
            saver: None,
            saved_at: 0,
            diverged: None,
        })
    }

    /// The model and its parameters.
    pub fn model(&self) -> &DistributedDataParallel<M> {
        &self.ddp
    }

    /// The loss scale of the next step.
    pub fn scaler(&self) -> &LossScaler {
        &self.scaler
    }

    /// What this rank of a pipeline did in the last step, in order; nothing without a pipeline.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Steps that were made, those before a checkpoint among them.
    pub fn steps(&self) -> usize {
        self.count.made() as usize
    }

    /// Trains to the end, or until the observer of some rank asks to stop; after [`load`](Self::load)
    /// from the step of the checkpoint on. With a [saver](Self::save_with), the last step is saved too.
    ///
    /// What is evaluated after a stop is no part of a run that will go on: the observer is not told then.
    ///
    /// # Errors
    ///
    /// [`TrainError`]; the other ranks learn of it at their next collective.
    pub fn fit(
        &mut self,
        data: &dyn Dataset,
        observer: &mut impl Observer,
    ) -> Result<Outcome, TrainError> {
        let left = self.config.steps.saturating_sub(self.steps());
        self.bytes_per_token = data.bytes_per_token();
        let samples = data.training(&Sampling {
            seq: self.sequence_length(),
            seed: self.config.seed,
            samples: self.samples + (left * self.config.global_batch_size) as u64,
        })?;
        let samples = self.read_ahead(samples, left)?;
        let (mut stopped, mut evaluated) = (false, None);
        while self.steps() < self.config.steps && !stopped {
            let started = Instant::now();
            let metrics = self.step(&samples)?;
            let timing = self.timing(&metrics, started);
            observer
                .step(&metrics, &timing)
                .map_err(TrainError::Observer)?;
            let steps = self.steps();
            let last = steps == self.config.steps;
            let is_due = |every: usize| steps.is_multiple_of(every);
            evaluated = match !last && self.config.evaluate_every.is_some_and(is_due) {
                true => Some(self.tell_held_out(data, observer)?),
                false => None,
            };
            self.save_if_due(observer)?;
            stopped = !last && !all_finite(!observer.stop(), self.ddp.groups())?;
        }
        tracing::debug!(waits = ?samples.waits(), "read ahead");
        self.save_the_end(observer)?;
        let held_out = match (evaluated, stopped && self.saver.is_some()) {
            (Some(held_out), _) => held_out,
            (None, true) => self.evaluate(data, self.steps())?,
            (None, false) => self.tell_held_out(data, observer)?,
        };
        Ok(Outcome {
            steps: self.steps(),
            skipped: self.count.skipped as usize,
            without_targets: self.count.without_targets as usize,
            diverged: self.diverged,
            stopped,
            held_out,
        })
    }

    fn tell_held_out(
        &self,
        data: &dyn Dataset,
        observer: &mut impl Observer,
    ) -> Result<HeldOutMetrics, TrainError> {
        let held_out = self.evaluate(data, self.steps())?;
        observer.held_out(&held_out).map_err(TrainError::Observer)?;
        Ok(held_out)
    }

    /// One update: all micro-batches, the reduction, and the optimizer. `samples` are those of the whole
    /// run, of which the step takes those that come next.
    ///
    /// No rank takes the step when a loss or a gradient is not finite anywhere, or when none of the
    /// targets of the global batch has a loss; the latter says nothing about the loss scale.
    ///
    /// # Errors
    ///
    /// See [`fit`](Self::fit).
    pub fn step(&mut self, samples: &dyn Samples) -> Result<StepMetrics, TrainError> {
        let step = self.steps();
        let _span = tracing::info_span!("step", step).entered();
        self.ddp.groups().world().begin_step(step as u64);
        let batches = self.batches(samples)?;
        let tokens = batches.iter().map(Batch::counted).sum();
        let losses = match &self.schedule {
            None => self.run_batches(&batches, step),
            Some(schedule) => {
                let (losses, events) = self.run_schedule(schedule, &batches, step)?;
                self.events = events;
                losses
            }
        };
        let scale = self.scaler.scale();
        let mut gradients = self.ddp.reduce(tokens)?;
        // Before the weights change: those that are gathered in 8 bits have the scales of the next step.
        self.ddp.fp8().end_step(self.ddp.groups())?;
        gradients.scale(1.0 / scale);
        let norm = global_norm(&gradients, &self.ddp)?;
        let losses = LossSums(self.sum_over_model(losses.0)?);
        let terms = self.ddp.module().loss_terms();
        let mean = losses.over(gradients.tokens as f64, terms);
        // A step that was skipped does not use up a part of the schedule.
        let learning_rate = self.learning_rates.lr(self.count.taken as usize);
        let skip_reason = self.skip_reason(&gradients, mean.is_finite() && norm.is_finite())?;
        let count_zeros = || count_zeros(&gradients, &self.ddp);
        let metrics = StepMetrics {
            step,
            loss: mean.loss,
            bits_per_byte: mean.bits_per_byte(self.bytes_per_token),
            minimised: mean.minimised,
            gradient_norm: norm,
            learning_rate,
            tokens: gradients.tokens,
            skipped: skip_reason.is_some(),
            skip_reason,
            loss_scale: (scale != 1.0).then_some(scale),
            zeros: self.config.count_zeros.then(count_zeros).transpose()?,
        };
        self.samples += self.config.global_batch_size as u64;
        match skip_reason {
            // Nothing was computed that could say how the run or its scale does.
            Some(SkipReason::NoTargets) => self.count.record_without_targets(),
            _ => {
                self.scaler.update(skip_reason.is_some());
                self.count.record(skip_reason.is_none());
                self.diverged = match mean.is_finite() {
                    true => None,
                    false => self.diverged.or(Some(step)),
                };
            }
        }
        self.check_skips()?;
        if skip_reason.is_none() {
            if norm > self.config.clip {
                gradients.scale(self.config.clip / norm);
            }
            self.optimizer.step(learning_rate, &mut self.ddp, gradients);
        } else {
            self.ddp.skipped();
        }
        let every = self.config.check_replicas_every;
        if every.is_some_and(|every| (step + 1).is_multiple_of(every)) {
            self.ddp.check_replicas()?;
        }
        Ok(metrics)
    }

    /// Why no rank takes the step, where none does; every rank must come. `own` says whether what this
    /// rank knows of loss and norm is finite.
    ///
    /// Of the ranks whose gradients are not what they should be the first one names what is wrong with
    /// them. With a dynamic loss scale that is how the scale is found, and no news.
    fn skip_reason(
        &self,
        gradients: &Gradients,
        own: bool,
    ) -> Result<Option<SkipReason>, CommError> {
        let world = self.ddp.groups().world();
        let (rank, culprits) = (world.rank(), &gradients.culprits);
        let first = if culprits.is_empty() {
            world.size()
        } else {
            rank
        };
        let own = [i64::from(own), first as i64];
        let [finite, first] = match world.all_reduce(own.to_vec().into(), ReduceOp::Min)? {
            Buffer::I64(all) => [all[0], all[1]],
            other => unreachable!("i64 went in, {} came out", other.dtype()),
        };
        let step = self.steps();
        for (number, culprit) in culprits.iter().enumerate() {
            let is_first = first == rank as i64 && number == 0;
            match self.scaler.state() {
                None if is_first => tracing::warn!(step, "{culprit}"),
                _ => tracing::debug!(step, "{culprit}"),
            }
        }
        Ok(
            match (
                gradients.tokens,
                finite == 1 && first == world.size() as i64,
            ) {
                (0, _) => Some(SkipReason::NoTargets),
                (_, false) => Some(SkipReason::NotFinite),
                (_, true) => None,
            },
        )
    }

    /// Ends a run in which no step is taken any more.
    fn check_skips(&self) -> Result<(), TrainError> {
        let checked = self.count.check(self.config.skip_limit);
        checked.map_err(|skips| match self.diverged {
            Some(step) => TrainError::Diverged { step, skips },
            None => skips.into(),
        })
    }

    /// The mean loss on held-out text after `steps` updates; every rank must come.
    ///
    /// # Errors
    ///
    /// See [`fit`](Self::fit).
    pub fn evaluate(&self, data: &dyn Dataset, steps: usize) -> Result<HeldOutMetrics, TrainError> {
        let _span = tracing::info_span!("evaluate", steps).entered();
        let windows = data.held_out(self.sequence_length(), self.config.held_out_samples)?;
        let (axis, size) = (self.ddp.groups().data(), self.config.micro_batch_size);
        let own = windows.iter().skip(axis.rank()).step_by(axis.size());
        let own: Vec<_> = own.cloned().collect();
        let mut batches: Vec<_> = own.chunks(size).map(|own| (own, true)).collect();
        if self.ddp.config().zero_stage == ZeroStage::Parameters {
            // Every rank gathers as often as the others: one that has less goes over a window again.
            let rounds = windows.len().div_ceil(axis.size()).div_ceil(size);
            batches.resize(rounds, (&windows[..1], false));
        }
        let terms = self.ddp.module().loss_terms();
        let (mut losses, mut tokens) = (LossSums::new(terms), 0.0);
        for (windows, counts) in batches {
            let batch = Batch::new(windows.iter().cloned())?;
            let weight = if counts { 1.0 } else { 0.0 };
            tokens += weight * batch.counted() as f64;
            let Some(hidden) = self.hidden(&batch)? else {
                continue;
            };
            let targets = matrix(&batch.targets, &batch, &self.device);
            losses.add_losses(self.ddp.module().losses_of(hidden, targets), weight);
        }
        let tokens = self.sum(vec![tokens], self.ddp.groups().data())?[0];
        let mean = LossSums(self.sum_over_model(losses.0)?).over(tokens, terms);
        Ok(HeldOutMetrics {
            step: steps,
            loss: mean.loss,
            bits_per_byte: mean.bits_per_byte(data.bytes_per_token()),
            minimised: mean.minimised,
            tokens: tokens as u64,
        })
    }

    fn sequence_length(&self) -> usize {
        self.config
            .sequence_length
            .unwrap_or(self.ddp.module().context())
    }

    /// The samples of each step that this rank runs.
    pub(super) fn own_samples(&self) -> Range<usize> {
        let axis = self.ddp.groups().data();
        let share = self.config.global_batch_size / axis.size();
        axis.rank() * share..(axis.rank() + 1) * share
    }

    /// Text after a prompt; every rank of the tensor and the pipeline axis must come, and under full
    /// sharding of the data axis too. All get the same. The seed is that of the run where none is given.
    ///
    /// # Errors
    ///
    /// [`TrainError`] for settings that draw nothing, a tokenizer of another model, and when a rank is
    /// missing.
    pub fn generate(
        &self,
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
    ) -> Result<Generated, TrainError> {
        let mut config = config.clone();
        config.seed = config.seed.or(Some(self.config.seed));
        let prompt = config.prompt_tokens(tokenizer);
        let prompt = prompt.map_err(GenerateError::from)?;
        let mut generator = Generator::new(self.ddp.module(), self.ddp.groups(), &self.device)
            .with_placement(self.placement());
        let written = generator.generate(&prompt, &config, tokenizer, &mut |_| Ok(()));
        Ok(written?)
    }

    /// Sums what one rank of each pipeline has, and the others have as zeros.
    fn sum_over_model(&self, values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        let groups = self.ddp.groups();
        self.sum(self.sum(values, groups.pipeline())?, groups.data())
    }

    fn sum(&self, values: Vec<f64>, comm: &Comm) -> Result<Vec<f64>, CommError> {
        match comm.all_reduce(values.into(), ReduceOp::Sum)? {
            Buffer::F64(values) => Ok(values),
            other => unreachable!("f64 went in, {} came out", other.dtype()),
        }
    }

    fn timing(&self, metrics: &StepMetrics, started: Instant) -> StepTiming {
        let seconds = started.elapsed().as_secs_f64();
        let tokens_per_second = metrics.tokens as f64 / seconds;
        let flops = self.ddp.module().flops_per_token(self.sequence_length());
        StepTiming {
            step: metrics.step,
            seconds,
            tokens_per_second,
            flops_per_second: tokens_per_second * flops,
        }
    }
}
