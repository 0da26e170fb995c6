//! The settings of a training run.

use std::num::NonZeroU64;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::hooks::batch_warmup::{BatchSizes, BatchWarmup, BatchWarmupError};
use super::hooks::sequence_warmup::{self, SequenceWarmup, SequenceWarmupError};
use super::schedule::{LrSchedule, LrScheduleError, LrStyle};
use burn_megatron::data_parallel::{DataParallelConfig, DataParallelConfigError, Precision};
use burn_megatron::mesh::{ContextSplitError, LayoutError, MeshError};
use burn_megatron::nn::tp_comm_overlap::NumSplitsError;
use burn_megatron::nn::{AttentionLayer, ParameterTable};
use burn_megatron::optim::{
    EmaConfig, LossScale, LossScaleError, OptimizerConfig, OptimizerError, QkClip, QkClipConfig,
    SpikeConfig, StepCount,
};
use burn_megatron_data::hybrid_context::HybridContextError;

mod in_layout;

/// Settings of a [`Trainer`](super::Trainer).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Optimizer steps.
    #[schemars(extend("flag" = "steps"))]
    pub steps: usize,
    /// Samples per micro-batch.
    #[schemars(extend("flag" = "micro-batch-size", "resume" = "order_of_sums"))]
    pub micro_batch_size: usize,
    /// Samples per step, over all ranks and micro-batches.
    #[schemars(extend("flag" = "global-batch-size"))]
    pub global_batch_size: usize,
    /// Smaller batches in the first steps, of increasing sizes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub batch_warmup: Vec<BatchWarmup>,
    /// Tokens per sample; by default the model's maximum sequence length.
    pub sequence_length: Option<usize>,
    /// Shorter rows in the first steps, of increasing lengths.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sequence_warmup: Vec<SequenceWarmup>,
    /// Seed of the weights, dropout, sampling and generated text.
    #[schemars(extend("flag" = "seed"))]
    pub seed: u64,
    /// The peak learning rate.
    #[schemars(extend("flag" = "lr"))]
    pub learning_rate: f64,
    /// The learning rate at the end.
    pub min_learning_rate: f64,
    /// Warm-up steps.
    pub warmup_steps: usize,
    /// The decay of the learning rate.
    pub schedule: LrStyle,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// Sharding over the data axis, precision, overlap. Not serialized here: a recipe has a table of its
    /// own for it.
    #[serde(skip)]
    pub data_parallel: DataParallelConfig,
    /// The loss scale, which keeps small gradients in the range of f16; by default dynamic for f16 and
    /// none for other types.
    pub loss_scale: Option<LossScale>,
    /// Patterns of the paths of parameters that are not trained.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub freeze: Vec<String>,
    /// Consecutive skipped steps after which the run fails.
    #[schemars(extend("resume" = "may_differ"))]
    pub skip_limit: NonZeroU64,
    /// Skips a step whose loss or gradient norm is a spike. By default no step is skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip_spikes: Option<SpikeConfig>,
    /// The exponential moving average (EMA) of the weights. By default there is no average.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema: Option<EmaConfig>,
    /// Limits attention logits after each step (QK-Clip). By default logits have no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_clip: Option<QkClipConfig>,
    /// Whether the largest logit of attention is measured in each step; with [`qk_clip`](Self::qk_clip) it always is.
    #[schemars(extend("resume" = "may_differ"))]
    pub log_max_attention_logit: bool,
    /// Steps between two checks that replicas have bit-equal weights.
    #[schemars(extend("resume" = "may_differ"))]
    pub check_replicas_every: Option<usize>,
    /// Steps between two steps that are [computed twice](super::ReplayError) and compared. The state is then also
    /// compared between all steps, and a step with a bad loss is computed again.
    #[schemars(extend("resume" = "may_differ"))]
    pub check_replay_every: Option<usize>,
    /// Whether a run must give the same bits on machines of one kind. Settings that could change the bits are refused
    /// or fixed by the command.
    #[schemars(extend("resume" = "may_differ"))]
    pub deterministic: bool,
    /// Whether micro-batches run as CUDA graphs. The launches of a forward and a backward are captured once for each
    /// shape of rows, in its third micro-batch, and then replayed by one call. Results are bit-equal. On CUDA devices,
    /// on one rank or over NCCL; for data parallelism with ZeRO-0 to 2, and dense models without dropout and FP8.
    #[schemars(extend("resume" = "may_differ", "experimental" = true))]
    pub cuda_graph: bool,
    /// Whether the elements of the gradient that are zero are counted in each step.
    #[serde(rename = "log_num_zeros_in_grad", alias = "count_zeros")]
    #[schemars(extend("resume" = "may_differ"))]
    pub count_zeros: bool,
    /// The maximum gradient norm; larger gradients are scaled down to it.
    pub clip: f64,
    /// Steps between two evaluations on held-out text; one always runs at the end, unless nothing is held out.
    #[schemars(extend("resume" = "may_differ"))]
    pub evaluate_every: Option<usize>,
    /// The maximum number of held-out samples per evaluation; 0 evaluates nothing.
    #[schemars(extend("resume" = "may_differ"))]
    pub held_out_samples: usize,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            micro_batch_size: 4,
            global_batch_size: 16,
            batch_warmup: vec![],
            sequence_length: None,
            sequence_warmup: vec![],
            seed: 1,
            learning_rate: 3e-3,
            min_learning_rate: 3e-4,
            warmup_steps: 10,
            schedule: LrStyle::Cosine,
            optimizer: OptimizerConfig::default(),
            data_parallel: DataParallelConfig::default(),
            loss_scale: None,
            skip_limit: StepCount::DEFAULT_LIMIT,
            freeze: vec![],
            skip_spikes: None,
            ema: None,
            qk_clip: None,
            log_max_attention_logit: false,
            check_replicas_every: None,
            check_replay_every: None,
            deterministic: false,
            cuda_graph: false,
            count_zeros: false,
            clip: 1.0,
            evaluate_every: None,
            held_out_samples: 64,
        }
    }
}

/// The maximum number of samples per step: all their indices are generated at once.
const MAX_SAMPLES: usize = 1 << 24;

/// The maximum number of steps: with the maximum number of samples, the total fits `u64`.
const MAX_STEPS: usize = 1 << 38;

/// Invalid settings of a run.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConfigError {
    /// A number that must be positive.
    #[error("invalid {name} = {value}: expected more than 0")]
    NotPositive {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// The batch is not divisible over the ranks.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The settings of skipped spikes.
    #[error(
        "invalid skip_spikes of {} sigmas and a window of {} steps: expected sigmas above 0, and a window of 2 to 65536",
        .0.sigmas, .0.window
    )]
    Spikes(SpikeConfig),
    /// The decay of the average of the weights.
    #[error("invalid ema.decay = {0}: expected at least 0 and below 1")]
    Ema(f64),
    /// The sequence cannot be split over the context axis.
    #[error(transparent)]
    Context(#[from] ContextSplitError),
    /// The ranks of context x data cannot share documents.
    #[error(transparent)]
    HybridContext(#[from] HybridContextError),
    /// A setting that the layout cannot have.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A setting that CUDA graphs cannot have.
    #[error("cuda_graph with {setting}: expected {expected}")]
    WithCudaGraph {
        /// The setting.
        setting: String,
        /// The values that would fit.
        expected: String,
    },
    /// The exchanges of the tensor axis cannot be split into chunks.
    #[error(transparent)]
    TpCommOverlap(#[from] NumSplitsError),
    /// The sequence is longer than the model's context.
    #[error(
        "sequence_length {length} is longer than the model's context: expected at most {context}"
    )]
    Sequence {
        /// Tokens per sample.
        length: usize,
        /// The model's maximum sequence length.
        context: usize,
    },
    /// A part of the batch size warm-up.
    #[error(transparent)]
    BatchWarmup(#[from] BatchWarmupError),
    /// A part of the sequence length warm-up.
    #[error(transparent)]
    SequenceWarmup(#[from] SequenceWarmupError),
    /// Shorter rows in a run on conversations.
    #[error(
        "train.sequence_warmup cuts rows, and with them the conversations of [data.chat]: remove it"
    )]
    CutsConversations,
    /// The learning rate schedule.
    #[error(transparent)]
    Schedule(#[from] LrScheduleError),
    /// Sharding and precision.
    #[error(transparent)]
    DataParallel(#[from] DataParallelConfigError),
    /// The optimizer, or a group of parameters.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// A number that is too large.
    #[error("invalid {name} = {value}: expected at most {most}")]
    TooLarge {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The maximum.
        most: usize,
    },
    /// The loss scale.
    #[error(transparent)]
    LossScale(#[from] LossScaleError),
}

impl TrainConfig {
    /// Pairs of a setting and the setting that it follows where a recipe leaves it out: see [`scaled`](Self::scaled).
    pub const FOLLOWING: [(&str, &str); 5] = [
        ("warmup_steps", "steps"),
        ("schedule", "steps"),
        ("batch_warmup", "steps"),
        ("sequence_warmup", "steps"),
        ("min_learning_rate", "learning_rate"),
    ];

    /// Returns the settings for another number of steps: warm-up and decay in proportion. A part that rounds to no step is
    /// left out, but for a decay, which has at least one.
    pub fn scaled(&self, steps: usize) -> Self {
        let before = self.steps.max(1) as u128;
        let part = |part: usize| {
            usize::try_from(part as u128 * steps as u128 / before).unwrap_or(usize::MAX)
        };
        let mut scaled = Self {
            steps,
            warmup_steps: part(self.warmup_steps),
            ..self.clone()
        };
        if let LrStyle::Wsd { decay_steps, .. } = &mut scaled.schedule {
            *decay_steps = part(*decay_steps).max(usize::from(*decay_steps > 0));
        }
        let ends_later = |end: &mut usize, until_step: &mut usize| {
            *until_step = part(*until_step);
            let is_some = *until_step > *end;
            *end = (*end).max(*until_step);
            is_some
        };
        let mut end = 0;
        let is_some = |warmup: &mut BatchWarmup| ends_later(&mut end, &mut warmup.until_step);
        scaled.batch_warmup.retain_mut(is_some);
        let mut end = 0;
        let is_some = |warmup: &mut SequenceWarmup| ends_later(&mut end, &mut warmup.until_step);
        scaled.sequence_warmup.retain_mut(is_some);
        scaled
    }

    /// Checks that rows may be conversations, which are never cut.
    ///
    /// # Errors
    ///
    /// [`ConfigError::CutsConversations`].
    pub fn check_conversations(&self) -> Result<(), ConfigError> {
        match self.sequence_warmup.is_empty() {
            true => Ok(()),
            false => Err(ConfigError::CutsConversations),
        }
    }

    /// Checks the settings that do not depend on a layout.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first invalid setting.
    pub fn check_without_layout(&self, context: usize) -> Result<(), ConfigError> {
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
            ("evaluate_every", self.evaluate_every.unwrap_or(1) as f64),
            (
                "check_replicas_every",
                self.check_replicas_every.unwrap_or(1) as f64,
            ),
            (
                "check_replay_every",
                self.check_replay_every.unwrap_or(1) as f64,
            ),
        ];
        for (name, value) in positive {
            if value.is_nan() || value <= 0.0 {
                return Err(ConfigError::NotPositive { name, value });
            }
        }
        let length = self.sequence_length.unwrap_or(context);
        let largest = [
            ("steps", self.steps, MAX_STEPS),
            ("global_batch_size", self.global_batch_size, MAX_SAMPLES),
            ("micro_batch_size", self.micro_batch_size, MAX_SAMPLES),
            ("held_out_samples", self.held_out_samples, MAX_STEPS),
        ];
        if let Some((name, value, most)) = largest.into_iter().find(|(_, value, most)| value > most)
        {
            return Err(ConfigError::TooLarge { name, value, most });
        }
        self.sizes().check(self.steps)?;
        if length > context {
            return Err(ConfigError::Sequence { length, context });
        }
        sequence_warmup::check(&self.sequence_warmup, self.steps, length)?;
        self.learning_rates()?;
        self.optimizer.check()?;
        if let Some(clip) = &self.qk_clip {
            clip.check()?;
        }
        if let Some(spikes) = self.skip_spikes.filter(|spikes| !spikes.is_valid()) {
            return Err(ConfigError::Spikes(spikes));
        }
        if let Some(ema) = self.ema.filter(|ema| !(0.0..1.0).contains(&ema.decay)) {
            return Err(ConfigError::Ema(ema.decay));
        }
        self.loss_scale().check()?;
        Ok(())
    }

    /// Returns the settings that decide what a step on a given batch computes; others have their defaults.
    pub fn of_a_step(&self) -> Self {
        Self {
            learning_rate: self.learning_rate,
            optimizer: self.optimizer.clone(),
            clip: self.clip,
            qk_clip: self.qk_clip,
            check_replay_every: self.check_replay_every,
            cuda_graph: self.cuda_graph,
            data_parallel: self.data_parallel.clone(),
            ..Self::default()
        }
    }

    /// Whether the logits of attention are limited after each step.
    pub fn limits_logits(&self) -> bool {
        self.qk_clip.is_some()
    }

    /// Checks that the attention layers of a full model, with its parameter table, allow the settings that use attention
    /// logits.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoAttention`], and the errors of [`QkClip::check_layers`].
    pub fn check_attention(
        &self,
        layers: &[AttentionLayer],
        table: &ParameterTable,
    ) -> Result<(), OptimizerError> {
        match self.measures_logits() {
            None => Ok(()),
            Some(setting) if layers.is_empty() => Err(OptimizerError::NoAttention { setting }),
            Some(_) if self.qk_clip.is_some() => QkClip::check_layers(layers, table),
            Some(_) => Ok(()),
        }
    }

    /// Returns the setting that uses attention logits, if one does.
    pub fn measures_logits(&self) -> Option<&'static str> {
        match self.qk_clip {
            Some(_) => Some("qk_clip"),
            None => self
                .log_max_attention_logit
                .then_some("log_max_attention_logit"),
        }
    }

    /// The tensors per parameter that the optimizer and the average of the weights keep, to plan the memory.
    pub fn state_tensors(&self) -> u8 {
        self.optimizer.state_tensors() + u8::from(self.ema.is_some())
    }

    /// The samples per step, from the smallest of the batch size warm-up to `global_batch_size`.
    pub fn batch_sizes(&self) -> impl Iterator<Item = usize> {
        let smaller = self.batch_warmup.iter().map(|part| part.global_batch_size);
        smaller.chain([self.global_batch_size])
    }

    /// The samples of every step.
    pub(crate) fn sizes(&self) -> BatchSizes {
        BatchSizes::new(self.batch_warmup.clone(), self.global_batch_size)
    }

    /// Returns the parts of the run with smaller batches, at its start.
    pub fn smaller_batches(&self) -> &[BatchWarmup] {
        &self.batch_warmup
    }

    /// Returns the parts of the run with shorter rows, at its start.
    pub fn shorter_rows(&self) -> &[SequenceWarmup] {
        &self.sequence_warmup
    }

    /// The samples of the whole run.
    pub fn samples(&self) -> u64 {
        self.sizes().sum(0..self.steps)
    }

    /// The lengths of rows in a run with samples of `whole` tokens.
    pub fn row_lengths(&self, whole: usize) -> impl Iterator<Item = usize> {
        let shorter = self.sequence_warmup.iter().map(|part| part.length);
        shorter.chain([whole])
    }

    /// The loss scale, with its default.
    pub fn loss_scale(&self) -> LossScale {
        let default = || match self.data_parallel.precision {
            Precision::F16 => LossScale::Dynamic(Default::default()),
            Precision::F64 | Precision::F32 | Precision::Bf16 => LossScale::None,
        };
        self.loss_scale.unwrap_or_else(default)
    }

    /// The learning rate of each step.
    ///
    /// # Errors
    ///
    /// [`LrScheduleError`] if it does not fit the number of steps.
    pub fn learning_rates(&self) -> Result<LrSchedule, LrScheduleError> {
        LrSchedule::new(
            self.learning_rate,
            self.min_learning_rate,
            self.warmup_steps,
            self.steps,
            self.schedule,
        )
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
