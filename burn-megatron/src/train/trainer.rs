//! The training loop of one rank.

use std::ops::Range;
use std::time::Instant;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::config::{ConfigError, TrainConfig};
use super::metrics::{HeldOutMetrics, StepMetrics, StepTiming, bits_per_byte};
use super::schedule::LrSchedule;
use super::{LanguageModel, Observer};
use crate::comm::{Buffer, CommError, Groups, ReduceOp};
use crate::data::{Batch, DataError, Sampler, TextData};
use crate::data_parallel::{DataParallelError, DistributedDataParallel};
use crate::mesh::Axis;
use crate::nn::ParallelModule;
use crate::optim::{ParallelAdamW, all_finite, global_norm};

/// Trains one rank's part of a model; every rank of the mesh has one.
pub struct Trainer<M> {
    ddp: DistributedDataParallel<M>,
    optimizer: ParallelAdamW,
    learning_rates: LrSchedule,
    config: TrainConfig,
    device: Device,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// The steps that were made, skipped ones among them.
    pub steps: usize,
    /// The steps that no rank took, as a loss or a gradient was not finite.
    pub skipped: usize,
    /// Whether it was stopped before its last step.
    pub stopped: bool,
    /// Held-out loss at the end.
    pub held_out: HeldOutMetrics,
}

/// What a run can fail with.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The gradients.
    #[error(transparent)]
    DataParallel(#[from] DataParallelError),
    /// The other ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The observer.
    #[error("{0}")]
    Observer(Box<dyn std::error::Error + Send + Sync>),
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
        config.check(groups.mesh().size(Axis::Data), model.module.context())?;
        let ddp = DistributedDataParallel::new(model, groups)?;
        Ok(Self {
            optimizer: ParallelAdamW::new(&config.optimizer, ddp.table()),
            learning_rates: config.learning_rates().map_err(ConfigError::from)?,
            ddp,
            config: config.clone(),
            device: device.clone().inner(),
        })
    }

    /// The model and its parameters.
    pub fn model(&self) -> &DistributedDataParallel<M> {
        &self.ddp
    }

    /// Trains to the end, or until the observer of some rank asks to stop.
    ///
    /// # Errors
    ///
    /// [`TrainError`]; the other ranks learn of it at their next collective.
    pub fn fit(
        &mut self,
        data: &TextData,
        observer: &mut impl Observer,
    ) -> Result<Outcome, TrainError> {
        let sampler = data.sampler(self.sequence_length(), self.config.seed)?;
        let (mut steps, mut skipped, mut stopped) = (0, 0, false);
        while steps < self.config.steps && !stopped {
            let started = Instant::now();
            let metrics = self.step(&sampler, steps)?;
            let timing = self.timing(&metrics, started);
            observer
                .step(&metrics, &timing)
                .map_err(TrainError::Observer)?;
            steps += 1;
            skipped += usize::from(metrics.skipped);
            let last = steps == self.config.steps;
            if !last
                && self
                    .config
                    .evaluate_every
                    .is_some_and(|every| steps.is_multiple_of(every))
            {
                observer
                    .held_out(&self.evaluate(data, steps)?)
                    .map_err(TrainError::Observer)?;
            }
            stopped = !last && !all_finite(!observer.stop(), self.ddp.groups())?;
        }
        let held_out = self.evaluate(data, steps)?;
        observer.held_out(&held_out).map_err(TrainError::Observer)?;
        Ok(Outcome {
            steps,
            skipped,
            stopped,
            held_out,
        })
    }

    /// One update: all micro-batches, the reduction, and the optimizer.
    ///
    /// No rank takes the step when a loss or a gradient is not finite anywhere.
    ///
    /// # Errors
    ///
    /// See [`fit`](Self::fit).
    pub fn step(&mut self, sampler: &Sampler, step: usize) -> Result<StepMetrics, TrainError> {
        let _span = tracing::info_span!("step", step).entered();
        let own = self.own_samples();
        let (mut loss, mut tokens) = (0.0, 0);
        for first in own.step_by(self.config.micro_batch_size) {
            let batch = sampler.batch(step, first..first + self.config.micro_batch_size)?;
            self.ddp.position().set(step as u64, first as u64);
            let sum = {
                let _span = tracing::debug_span!("forward").entered();
                let device = self.device.clone().autodiff();
                self.ddp
                    .forward(&device, |model| loss_sum(model, &batch, &device))
            };
            loss += sum.clone().into_scalar::<f64>();
            tokens += batch.tokens.len() as u64;
            self.ddp.backward(sum);
        }
        let mut gradients = self.ddp.reduce(tokens)?;
        let norm = global_norm(&gradients, &self.ddp)?;
        let loss = self.sum_over_data(loss)? / gradients.tokens as f64;
        let learning_rate = self.learning_rates.lr(step);
        let finite = all_finite(loss.is_finite() && norm.is_finite(), self.ddp.groups())?;
        let metrics = StepMetrics {
            step,
            loss,
            bits_per_byte: bits_per_byte(loss, 1.0),
            gradient_norm: norm,
            learning_rate,
            tokens: gradients.tokens,
            skipped: !finite,
        };
        if finite {
            if norm > self.config.clip {
                gradients.scale(self.config.clip / norm);
            }
            self.optimizer.step(learning_rate, &mut self.ddp, gradients);
        }
        Ok(metrics)
    }

    /// The mean loss on held-out text after `steps` updates; every rank must come.
    ///
    /// # Errors
    ///
    /// See [`fit`](Self::fit).
    pub fn evaluate(&self, data: &TextData, steps: usize) -> Result<HeldOutMetrics, TrainError> {
        let _span = tracing::info_span!("evaluate", steps).entered();
        let windows =
            data.held_out_windows(self.sequence_length(), self.config.held_out_samples)?;
        let axis = self.ddp.groups().data();
        let own = windows
            .into_iter()
            .skip(axis.rank())
            .step_by(axis.size())
            .collect::<Vec<_>>();
        let (mut loss, mut tokens) = (0.0, 0);
        for windows in own.chunks(self.config.micro_batch_size) {
            let batch = Batch::new(windows.iter().copied())?;
            loss += loss_sum(self.ddp.module(), &batch, &self.device).into_scalar::<f64>();
            tokens += batch.tokens.len();
        }
        let tokens = self.sum_over_data(tokens as f64)?;
        let loss = self.sum_over_data(loss)? / tokens;
        Ok(HeldOutMetrics {
            step: steps,
            loss,
            bits_per_byte: bits_per_byte(loss, 1.0),
            tokens: tokens as u64,
        })
    }

    fn sequence_length(&self) -> usize {
        self.config
            .sequence_length
            .unwrap_or(self.ddp.module().context())
    }

    /// The samples of each step that this rank runs.
    fn own_samples(&self) -> Range<usize> {
        let axis = self.ddp.groups().data();
        let share = self.config.global_batch_size / axis.size();
        axis.rank() * share..(axis.rank() + 1) * share
    }

    fn sum_over_data(&self, value: f64) -> Result<f64, CommError> {
        let sum = self
            .ddp
            .groups()
            .data()
            .all_reduce(vec![value].into(), ReduceOp::Sum)?;
        match sum {
            Buffer::F64(values) => Ok(values[0]),
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

fn loss_sum<M: LanguageModel>(model: &M, batch: &Batch, device: &Device) -> Tensor<1> {
    let matrix = |values: &Vec<i32>| {
        let data = TensorData::new(values.clone(), [batch.rows, batch.seq]);
        Tensor::<2, Int>::from_data(data, device)
    };
    model
        .losses(matrix(&batch.tokens), matrix(&batch.targets), None)
        .sum()
}
