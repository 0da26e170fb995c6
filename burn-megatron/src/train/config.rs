//! What a training run is told.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use super::schedule::{LrSchedule, LrStyle, ScheduleError};
use crate::data_parallel::{DataParallelConfig, DataParallelConfigError, Precision};
use crate::mesh::{MeshError, share_batch};
use crate::optim::{AdamWConfig, LossScale, LossScaleError, OptimizerError, StepCount};

/// Settings of a [`Trainer`](super::Trainer).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Optimizer steps.
    pub steps: usize,
    /// Samples that a rank runs through the model at once.
    pub micro_batch_size: usize,
    /// Samples of a step, over all ranks of the data axis and all micro-batches.
    pub global_batch_size: usize,
    /// Tokens of a sample; the model's longest sequence where not given.
    pub sequence_length: Option<usize>,
    /// Seed of the weights, of dropout, of the choice of samples and of the generated text.
    pub seed: u64,
    /// The peak of the learning rate.
    pub learning_rate: f64,
    /// Its end.
    pub min_learning_rate: f64,
    /// Steps in which it rises.
    pub warmup_steps: usize,
    /// How it falls.
    pub schedule: LrStyle,
    /// AdamW.
    pub optimizer: AdamWConfig,
    /// What is sharded over the data axis, the type that the model computes in, what overlaps. It is
    /// no part of the text of these settings: a recipe has a table of its own for it.
    #[serde(skip)]
    pub data_parallel: DataParallelConfig,
    /// What the loss is multiplied with, so that small gradients stay in the range of f16;
    /// dynamic for f16 and none for other types where not given.
    pub loss_scale: Option<LossScale>,
    /// Skipped steps in a row after which the run ends.
    pub skip_limit: NonZeroU64,
    /// Steps between two comparisons of the weights of ranks that hold the same.
    pub check_replicas_every: Option<usize>,
    /// Whether the elements of the gradient that are zero are counted in each step.
    pub count_zeros: bool,
    /// The largest gradient norm; larger gradients are scaled down to it.
    pub clip: f64,
    /// Steps between two evaluations on held-out text; there is always one at the end.
    pub evaluate_every: Option<usize>,
    /// The most held-out samples of an evaluation.
    pub held_out_samples: usize,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            micro_batch_size: 4,
            global_batch_size: 16,
            sequence_length: None,
            seed: 1,
            learning_rate: 3e-3,
            min_learning_rate: 3e-4,
            warmup_steps: 10,
            schedule: LrStyle::Cosine,
            optimizer: AdamWConfig::default(),
            data_parallel: DataParallelConfig::default(),
            loss_scale: None,
            skip_limit: StepCount::USUAL_LIMIT,
            check_replicas_every: None,
            count_zeros: false,
            clip: 1.0,
            evaluate_every: None,
            held_out_samples: 64,
        }
    }
}

/// The most samples of a step: the indices of all of them are made at once.
const MOST_SAMPLES: usize = 1 << 24;

/// The most steps: with the most samples in each they can still be counted.
const MOST_STEPS: usize = 1 << 38;

/// A run that makes no sense.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConfigError {
    /// A number that must be above zero.
    #[error("{name} = {value} makes no run; it must be above 0")]
    NotPositive {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// The batch cannot be shared.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The sequence is longer than the model's.
    #[error("sequence_length {length} is longer than the model's context of {context}")]
    Sequence {
        /// Tokens of a sample.
        length: usize,
        /// The model's longest sequence.
        context: usize,
    },
    /// The learning rate.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Sharding and precision.
    #[error(transparent)]
    DataParallel(#[from] DataParallelConfigError),
    /// The optimizer, or a group of parameters.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// A number that is too large to be counted on with.
    #[error("{name} = {value} is more than a run can have; at most {most} fits")]
    TooLarge {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The largest that fits.
        most: usize,
    },
    /// The loss scale.
    #[error(transparent)]
    LossScale(#[from] LossScaleError),
}

impl TrainConfig {
    /// Checks every size before anything is built, for a data axis of `data` ranks and a model with
    /// `context` tokens.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first setting that does not fit.
    pub fn check(&self, data: usize, context: usize) -> Result<(), ConfigError> {
        let positive = [
            ("steps", self.steps as f64),
            ("micro_batch_size", self.micro_batch_size as f64),
            ("global_batch_size", self.global_batch_size as f64),
            (
                "sequence_length",
                self.sequence_length.unwrap_or(context) as f64,
            ),
            ("learning_rate", self.learning_rate),
            ("clip", self.clip),
            ("held_out_samples", self.held_out_samples as f64),
            ("evaluate_every", self.evaluate_every.unwrap_or(1) as f64),
            (
                "check_replicas_every",
                self.check_replicas_every.unwrap_or(1) as f64,
            ),
        ];
        for (name, value) in positive {
            if value.is_nan() || value <= 0.0 {
                return Err(ConfigError::NotPositive { name, value });
            }
        }
        let length = self.sequence_length.unwrap_or(context);
        let largest = [
            ("steps", self.steps, MOST_STEPS),
            ("global_batch_size", self.global_batch_size, MOST_SAMPLES),
            ("micro_batch_size", self.micro_batch_size, MOST_SAMPLES),
            ("held_out_samples", self.held_out_samples, MOST_STEPS),
        ];
        if let Some((name, value, most)) = largest.into_iter().find(|(_, value, most)| value > most)
        {
            return Err(ConfigError::TooLarge { name, value, most });
        }
        share_batch(self.global_batch_size, data, Some(self.micro_batch_size))?;
        if length > context {
            return Err(ConfigError::Sequence { length, context });
        }
        self.learning_rates()?;
        self.data_parallel.check(data)?;
        self.optimizer.check()?;
        self.loss_scale().check()?;
        Ok(())
    }

    /// What the loss is multiplied with.
    pub fn loss_scale(&self) -> LossScale {
        let usual = || match self.data_parallel.precision {
            Precision::F16 => LossScale::Dynamic(Default::default()),
            Precision::F32 | Precision::Bf16 => LossScale::None,
        };
        self.loss_scale.unwrap_or_else(usual)
    }

    /// The learning rate of each step.
    ///
    /// # Errors
    ///
    /// [`ScheduleError`] when its parts do not fit the run.
    pub fn learning_rates(&self) -> Result<LrSchedule, ScheduleError> {
        LrSchedule::new(
            self.learning_rate,
            self.min_learning_rate,
            self.warmup_steps,
            self.steps,
            self.schedule,
        )
    }
}
