//! The measurements of a run, which are written to files with one JSON object per line.
//!
//! There are two files. [`MetricsLog`] writes numbers that are equal, byte for byte, in every run with the same layout
//! and seed. [`TimingsLog`] writes times. Both files are append-only. A run that is resumed from a checkpoint appends a
//! line of the kind `resumed`. This line invalidates the earlier lines of the steps that the run repeats.
//!
//! JSON cannot represent NaN and infinity. They are written as the strings `"NaN"`, `"inf"` and `"-inf"`, and are
//! converted back to numbers when a file is read.
//!
//! The number of a step is the number of updates including its own update, so the first step is step 1. The progress
//! output and the names of checkpoints use the same numbers.
//!
//! The first line of a metrics file contains its [`VERSION`], which defines the meaning of `loss` and `step`. Files of
//! version 1 do not have this line. When an older file is read, its step numbers are converted to the current version.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::expert_metrics::{ExpertLoad, ExpertSummary};
use super::json_float;

mod log;
mod read;

pub use log::{MetricsLog, TimingsLog, last_saved_step};
pub use read::{oldest_version, read_metrics};

/// The version of a metrics file, which defines the meaning of its numbers.
///
/// - 1: `loss` is the objective, including label smoothing and z-loss if enabled.
/// - 2: `loss` is the cross-entropy alone. The objective, if it differs, is in separate fields ([`Minimised`]).
/// - 3: `step` is the number of updates, so it starts from 1. In version 2 it starts from 0, except in held-out
///   records.
pub const VERSION: u32 = 3;

/// The first line of a metrics file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunMetrics {
    /// The version of the file: see [`VERSION`].
    pub version: u32,
}

/// The objective that training minimizes, and its terms. They are present if the objective differs from the
/// cross-entropy. The objective is the sum of the cross-entropy and the terms. All values are means over the same
/// tokens as the cross-entropy, in nats per token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Minimised {
    /// The objective: the sum of the cross-entropy and all terms.
    #[serde(skip_serializing_if = "Option::is_none", with = "json_float::option")]
    pub objective: Option<f64>,
    /// The term that label smoothing adds to the cross-entropy.
    #[serde(skip_serializing_if = "Option::is_none", with = "json_float::option")]
    pub label_smoothing: Option<f64>,
    /// The z-loss, multiplied by its weight.
    #[serde(skip_serializing_if = "Option::is_none", with = "json_float::option")]
    pub z_loss: Option<f64>,
    /// The loss of multi-token prediction, multiplied by its weight.
    #[serde(skip_serializing_if = "Option::is_none", with = "json_float::option")]
    pub further_tokens: Option<f64>,
}

impl Minimised {
    /// Returns the names and values of the terms that are present.
    pub fn terms(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let terms = [
            ("label smoothing", self.label_smoothing),
            ("z-loss", self.z_loss),
            ("further tokens", self.further_tokens),
        ];
        terms
            .into_iter()
            .filter_map(|(name, term)| Some((name, term?)))
    }
}

/// The reason for skipping a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// The loss or a gradient is not finite, or a gradient exceeds the limit.
    NotFinite,
    /// All targets of the global batch are masked, so there is no loss.
    NoTargets,
    /// The loss or the gradient norm is a spike: see [`SpikeConfig`](burn_megatron::optim::SpikeConfig).
    Spike,
}

/// The metrics of one training step, measured before its update.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The number of the step: the number of updates up to and including this step. Skipped updates are counted. `loss`
    /// is measured before the update.
    pub step: usize,
    /// The mean cross-entropy over the tokens of the global batch, in nats per token. NaN if no token has a target.
    #[serde(with = "json_float")]
    pub loss: f64,
    /// The cross-entropy in bits per byte of text: see [`bits_per_byte`].
    #[serde(with = "json_float")]
    pub bits_per_byte: f64,
    /// The objective, if it differs from the cross-entropy.
    #[serde(flatten)]
    pub minimised: Minimised,
    /// The Euclidean norm of the gradient of all parameters, before clipping.
    #[serde(with = "json_float")]
    pub gradient_norm: f64,
    /// The learning rate of the update.
    #[serde(with = "json_float")]
    pub learning_rate: f64,
    /// The number of tokens of the global batch that have a loss.
    pub tokens: u64,
    /// Whether the update was skipped, for example because a gradient is not finite.
    pub skipped: bool,
    /// The reason for which the update was skipped. It is absent in files of version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip_reason: Option<SkipReason>,
    /// The loss scale of the step, if it is not 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// The number of gradient elements that are zero, if they are counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros: Option<u64>,
    /// The largest attention logit of all layers, heads, samples and ranks, if it is measured.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        with = "json_float::option"
    )]
    pub max_attention_logit: Option<f64>,
}

/// The loss on held-out text.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HeldOutMetrics {
    /// The number of updates before the evaluation.
    pub step: usize,
    /// The mean cross-entropy, in nats per token.
    #[serde(with = "json_float")]
    pub loss: f64,
    /// The cross-entropy in bits per byte of text: see [`bits_per_byte`].
    #[serde(with = "json_float")]
    pub bits_per_byte: f64,
    /// The objective on held-out text, if it differs from the cross-entropy.
    #[serde(flatten)]
    pub minimised: Minimised,
    /// The number of evaluated tokens that have a loss.
    pub tokens: u64,
}

/// The time of one training step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepTiming {
    /// The number of the step: the number of updates up to and including this step.
    pub step: usize,
    /// The wall time of the step in seconds. If readings are [deferred](super::Trainer::defer_readings), the time of
    /// the last step before an evaluation, a checkpoint or the end of the run cannot be measured. It is then the mean
    /// time of the steps since the previous such event.
    #[serde(with = "json_float")]
    pub seconds: f64,
    /// The throughput in tokens of the global batch per second.
    #[serde(with = "json_float")]
    pub tokens_per_second: f64,
    /// The number of floating-point operations of the model per second, summed over all ranks. Recomputation is not
    /// counted.
    #[serde(with = "json_float")]
    pub flops_per_second: f64,
}

/// The time of one checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SaveTiming {
    /// The number of updates before the checkpoint.
    pub saved_step: u64,
    /// The size of the checkpoint's tensors, in bytes.
    pub bytes: u64,
    /// The wall time until the checkpoint was published, in seconds.
    #[serde(with = "json_float")]
    pub seconds: f64,
    /// The time for which saving the checkpoint blocked training, in seconds.
    #[serde(with = "json_float")]
    pub stall_seconds: f64,
}

/// A record of a metrics file. The JSON field `kind` distinguishes the variants.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MetricsRecord {
    /// The version of the file. The record has `"kind": "run"`.
    Run(RunMetrics),
    /// The metrics of a training step. The record has `"kind": "step"`.
    Step(StepMetrics),
    /// The loss on held-out text. The record has `"kind": "held_out"`.
    HeldOut(HeldOutMetrics),
    /// The balance of the expert load, which is written after the metrics of the step. The record has
    /// `"kind": "experts"`.
    Experts(ExpertSummary),
    /// The load of each expert in the step before an evaluation, which is written after the metrics of the step. The
    /// record has `"kind": "expert_load"`.
    ExpertLoad(ExpertLoad),
}

/// Converts a loss in nats per token to bits per byte of text: `loss / (ln 2 * bytes_per_token)`.
///
/// For a byte-level tokenizer, `bytes_per_token` is 1.
///
/// ```
/// use burn_megatron_train::metrics::bits_per_byte;
///
/// // The loss of uniform predictions of bytes.
/// assert!((bits_per_byte(256f64.ln(), 1.0) - 8.0).abs() < 1e-12);
/// ```
pub fn bits_per_byte(loss: f64, bytes_per_token: f64) -> f64 {
    loss / (std::f64::consts::LN_2 * bytes_per_token)
}

/// An error that occurred while a metrics or timings file was read or written.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// An I/O error.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A line is not a valid record.
    #[error(
        "line {line} of '{path}' is not a record of a run: {source}; remove that line, or move the file away, and a \
         resumed run starts a new one"
    )]
    BadLine {
        /// The path of the file.
        path: PathBuf,
        /// The line number, counted from 1.
        line: usize,
        /// The error of the JSON parser.
        source: serde_json::Error,
    },
    /// The file has a newer version than this program supports.
    #[error(
        "'{path}' has metrics of version {version}: expected version 1 to {VERSION}; update this program"
    )]
    Version {
        /// The path of the file.
        path: PathBuf,
        /// The version of the file.
        version: u32,
    },
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
