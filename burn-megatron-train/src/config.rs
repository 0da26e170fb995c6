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
    /// The number of optimizer steps.
    #[schemars(extend("flag" = "steps"))]
    pub steps: usize,
    /// The number of samples per micro-batch.
    #[schemars(extend("flag" = "micro-batch-size", "resume" = "order_of_sums"))]
    pub micro_batch_size: usize,
    /// The number of samples per step, summed over all ranks and micro-batches.
    #[schemars(extend("flag" = "global-batch-size"))]
    pub global_batch_size: usize,
    /// Batch size warm-up: smaller global batches of increasing size in the first steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub batch_warmup: Vec<BatchWarmup>,
    /// The number of tokens per sample. The default is the maximum sequence length of the model.
    pub sequence_length: Option<usize>,
    /// Sequence length warm-up: shorter sequences of increasing length in the first steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sequence_warmup: Vec<SequenceWarmup>,
    /// The random seed of the initial weights, dropout, the order of samples and generated text.
    #[schemars(extend("flag" = "seed"))]
    pub seed: u64,
    /// The peak learning rate.
    #[schemars(extend("flag" = "lr"))]
    pub learning_rate: f64,
    /// The learning rate at the end of the decay.
    pub min_learning_rate: f64,
    /// The number of warm-up steps of the learning rate.
    pub warmup_steps: usize,
    /// The shape of the learning rate decay.
    pub schedule: LrStyle,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// Settings of data parallelism: sharding, precision and overlap. Not serialized here: a recipe has a separate
    /// table for these settings.
    #[serde(skip)]
    pub data_parallel: DataParallelConfig,
    /// The loss scale, which keeps small gradients in the range of f16. The default is a dynamic scale for f16 and no
    /// scale for other types.
    pub loss_scale: Option<LossScale>,
    /// Patterns of parameter paths. Parameters whose path matches a pattern are frozen: they are not trained.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub freeze: Vec<String>,
    /// The number of consecutive skipped steps at which the run fails.
    #[schemars(extend("resume" = "may_differ"))]
    pub skip_limit: NonZeroU64,
    /// The spike detection, which skips steps with a spike of the loss or the gradient norm. By default it is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip_spikes: Option<SpikeConfig>,
    /// The exponential moving average (EMA) of the weights. By default it is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ema: Option<EmaConfig>,
    /// QK-Clip, which limits the attention logits after each step. By default it is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_clip: Option<QkClipConfig>,
    /// Whether the largest attention logit is measured in each step. [`qk_clip`](Self::qk_clip) always measures it.
    #[schemars(extend("resume" = "may_differ"))]
    pub log_max_attention_logit: bool,
    /// The number of steps between two checks that all replicas have bitwise equal weights.
    #[schemars(extend("resume" = "may_differ"))]
    pub check_replicas_every: Option<usize>,
    /// The number of steps between two replay checks. A replay check [computes a step twice](super::ReplayError) and
    /// compares the results. If this is set, the state is also checked for changes between consecutive steps, and a
    /// step with an invalid loss is computed again.
    #[schemars(extend("resume" = "may_differ"))]
    pub check_replay_every: Option<usize>,
    /// Whether a run must give bitwise equal results on machines of the same kind. A setting that could change the
    /// results is an error, unless the command that starts the run sets it to a fixed value.
    #[schemars(extend("resume" = "may_differ"))]
    pub deterministic: bool,
    /// Whether micro-batches run as CUDA graphs. The forward and backward of the third micro-batch of each input shape
    /// are captured. Later micro-batches with this shape replay the graph with one call. The results are bitwise equal
    /// to the results without CUDA graphs. Requires CUDA devices, one rank or NCCL, data parallelism with ZeRO-0 to 2,
    /// and a dense model without dropout and FP8.
    #[schemars(extend("resume" = "may_differ", "experimental" = true))]
    pub cuda_graph: bool,
    /// Whether the gradient elements that are zero are counted in each step.
    #[serde(rename = "log_num_zeros_in_grad", alias = "count_zeros")]
    #[schemars(extend("resume" = "may_differ"))]
    pub count_zeros: bool,
    /// The maximum gradient norm. Gradients with a larger norm are scaled down to this norm.
    pub clip: f64,
    /// The number of steps between two evaluations on held-out text. There is also an evaluation at the end of the run.
    #[schemars(extend("resume" = "may_differ"))]
    pub evaluate_every: Option<usize>,
    /// The maximum number of held-out samples per evaluation. 0 disables evaluation.
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

/// The maximum number of samples per step. The indices of all samples of a step are generated at once.
const MAX_SAMPLES: usize = 1 << 24;

/// The maximum number of steps. The total number of samples then fits `u64`.
const MAX_STEPS: usize = 1 << 38;

/// An error for invalid settings of a run.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConfigError {
    /// A setting must be positive, but its value is not.
    #[error("invalid {name} = {value}: expected more than 0")]
    NotPositive {
        /// The name of the setting.
        name: &'static str,
        /// The value of the setting.
        value: f64,
    },
    /// The global batch cannot be divided over the ranks.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The settings of `skip_spikes` are invalid.
    #[error(
        "invalid skip_spikes of {} sigmas and a window of {} steps: expected sigmas above 0, and a window of 2 to 65536",
        .0.sigmas, .0.window
    )]
    Spikes(SpikeConfig),
    /// The decay of the EMA of the weights is invalid.
    #[error("invalid ema.decay = {0}: expected at least 0 and below 1")]
    Ema(f64),
    /// The sequence cannot be split over the context axis.
    #[error(transparent)]
    Context(#[from] ContextSplitError),
    /// Hybrid context parallelism is impossible: the ranks of the context and data axes cannot share documents.
    #[error(transparent)]
    HybridContext(#[from] HybridContextError),
    /// A setting conflicts with the layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A setting conflicts with CUDA graphs.
    #[error("cuda_graph conflicts with {setting}: expected {expected}")]
    WithCudaGraph {
        /// The name of the setting.
        setting: String,
        /// The expected values.
        expected: String,
    },
    /// The communication of tensor parallelism cannot be split into the requested number of chunks.
    #[error(transparent)]
    TpCommOverlap(#[from] NumSplitsError),
    /// The sequence length is larger than the maximum sequence length of the model.
    #[error(
        "sequence_length {length} is longer than the model's context: expected at most {context}"
    )]
    Sequence {
        /// The number of tokens per sample.
        length: usize,
        /// The maximum sequence length of the model.
        context: usize,
    },
    /// A part of the batch size warm-up is invalid.
    #[error(transparent)]
    BatchWarmup(#[from] BatchWarmupError),
    /// A part of the sequence length warm-up is invalid.
    #[error(transparent)]
    SequenceWarmup(#[from] SequenceWarmupError),
    /// The sequence length warm-up conflicts with conversations as training data, because it would cut them.
    #[error(
        "train.sequence_warmup conflicts with [data.chat], because it cuts rows and the conversations in them: remove \
         train.sequence_warmup"
    )]
    CutsConversations,
    /// The learning rate schedule is invalid.
    #[error(transparent)]
    Schedule(#[from] LrScheduleError),
    /// The settings of sharding or precision are invalid.
    #[error(transparent)]
    DataParallel(#[from] DataParallelConfigError),
    /// The settings of the optimizer or of a parameter group are invalid.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// The value of a setting is too large.
    #[error("invalid {name} = {value}: expected at most {most}")]
    TooLarge {
        /// The name of the setting.
        name: &'static str,
        /// The value of the setting.
        value: usize,
        /// The maximum value of the setting.
        most: usize,
    },
    /// The loss scale is invalid.
    #[error(transparent)]
    LossScale(#[from] LossScaleError),
}

impl TrainConfig {
    /// Pairs of setting names. In a pair, the default of the first setting is derived from the second setting: see
    /// [`scaled`](Self::scaled).
    pub const FOLLOWING: [(&str, &str); 5] = [
        ("warmup_steps", "steps"),
        ("schedule", "steps"),
        ("batch_warmup", "steps"),
        ("sequence_warmup", "steps"),
        ("min_learning_rate", "learning_rate"),
    ];

    /// Returns these settings for another number of steps. The lengths of the warm-up and the decay are scaled in
    /// proportion. A warm-up or a part of it that is rounded to 0 steps is removed. A decay keeps at least one step.
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

    /// Checks that no setting splits samples, because conversations that are used as training data must not be split.
    ///
    /// # Errors
    ///
    /// [`ConfigError::CutsConversations`] if a setting splits samples.
    pub fn check_conversations(&self) -> Result<(), ConfigError> {
        match self.sequence_warmup.is_empty() {
            true => Ok(()),
            false => Err(ConfigError::CutsConversations),
        }
    }

    /// Checks the settings that do not depend on a layout.
    ///
    /// ```
    /// use burn_megatron_train::TrainConfig;
    ///
    /// let config: TrainConfig = toml::from_str("steps = 50\nglobal_batch_size = 8\nwarmup_steps = 5")?;
    /// config.check_without_layout(128)?;
    /// assert_eq!(config.samples(), 50 * 8);
    /// let error = TrainConfig { clip: 0.0, ..config }.check_without_layout(128).unwrap_err();
    /// assert_eq!(error.to_string(), "invalid clip = 0: expected more than 0");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

    /// Returns only the settings that affect the computation of a step on a given batch. All other settings are set to
    /// their defaults.
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

    /// Returns whether QK-Clip limits the attention logits after each step.
    pub fn limits_logits(&self) -> bool {
        self.qk_clip.is_some()
    }

    /// Checks that the attention layers of a complete model support the settings that use attention logits, given the
    /// parameter table of the model.
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

    /// Returns the name of the setting that uses attention logits, or `None` if no setting uses them.
    pub fn measures_logits(&self) -> Option<&'static str> {
        match self.qk_clip {
            Some(_) => Some("qk_clip"),
            None => self
                .log_max_attention_logit
                .then_some("log_max_attention_logit"),
        }
    }

    /// Returns the number of optimizer state tensors and EMA tensors per parameter. This number is used to plan the
    /// memory.
    pub fn state_tensors(&self) -> u8 {
        self.optimizer.state_tensors() + u8::from(self.ema.is_some())
    }

    /// Returns all global batch sizes of the run, in samples per step, from the first size of the batch size warm-up to
    /// `global_batch_size`.
    ///
    /// ```
    /// use burn_megatron_train::{BatchWarmup, TrainConfig};
    ///
    /// let config = TrainConfig {
    ///     steps: 20,
    ///     global_batch_size: 16,
    ///     batch_warmup: vec![BatchWarmup { until_step: 10, global_batch_size: 4 }],
    ///     ..TrainConfig::default()
    /// };
    /// assert_eq!(config.batch_sizes().collect::<Vec<_>>(), [4, 16]);
    /// assert_eq!(config.samples(), 10 * 4 + 10 * 16);
    /// ```
    pub fn batch_sizes(&self) -> impl Iterator<Item = usize> {
        let smaller = self.batch_warmup.iter().map(|part| part.global_batch_size);
        smaller.chain([self.global_batch_size])
    }

    /// Returns the number of samples of each step.
    pub(crate) fn sizes(&self) -> BatchSizes {
        BatchSizes::new(self.batch_warmup.clone(), self.global_batch_size)
    }

    /// Returns the parts of the batch size warm-up, which set smaller batch sizes for the first steps of the run.
    pub fn smaller_batches(&self) -> &[BatchWarmup] {
        &self.batch_warmup
    }

    /// Returns the parts of the sequence length warm-up, which set shorter sequences for the first steps of the run.
    pub fn shorter_rows(&self) -> &[SequenceWarmup] {
        &self.sequence_warmup
    }

    /// Returns the total number of samples of the run.
    pub fn samples(&self) -> u64 {
        self.sizes().sum(0..self.steps)
    }

    /// Returns all sequence lengths of the run, from the first length of the sequence length warm-up to `whole`, which
    /// is the number of tokens per sample.
    pub fn row_lengths(&self, whole: usize) -> impl Iterator<Item = usize> {
        let shorter = self.sequence_warmup.iter().map(|part| part.length);
        shorter.chain([whole])
    }

    /// Returns the loss scale that is set, or the default for the precision.
    pub fn loss_scale(&self) -> LossScale {
        let default = || match self.data_parallel.precision {
            Precision::F16 => LossScale::Dynamic(Default::default()),
            Precision::F64 | Precision::F32 | Precision::Bf16 => LossScale::None,
        };
        self.loss_scale.unwrap_or_else(default)
    }

    /// Returns the learning rate schedule, which contains the learning rate of each step.
    ///
    /// # Errors
    ///
    /// [`LrScheduleError`] if warm-up and decay are invalid for the number of steps.
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
