//! The measurements of a run, one JSON object per line.
//!
//! There are two files: [`MetricsLog`] writes numbers that are equal, byte for byte, in every run with the same layout
//! and seed; [`TimingsLog`] writes times. Both files are append-only. A run that is resumed from a checkpoint writes a
//! line of the kind `resumed`, which invalidates earlier lines of the repeated steps.
//!
//! JSON has no NaN and no infinity. Such numbers are written as the strings `"NaN"`, `"inf"` and `"-inf"`, and read
//! back as numbers.
//!
//! Steps are numbered from 1, by the number of updates, as in the progress output and the names of checkpoints.
//!
//! The first line of a metrics file holds its [`VERSION`], which defines the meaning of `loss` and `step`. Files of
//! version 1 have no such line. Records that are read from an older file have the step numbers of the current version.

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
/// - 2: `loss` is the cross-entropy alone; the objective, if it differs, is a separate field
///   ([`Minimised`]).
/// - 3: `step` is the number of updates done, from 1. In version 2 it starts from 0, except in held-out records.
pub const VERSION: u32 = 3;

/// The first line of a metrics file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunMetrics {
    /// See [`VERSION`].
    pub version: u32,
}

/// The objective, if it differs from the cross-entropy. Values are means over the same tokens as the loss, in nats per
/// token. The objective is the sum of the loss and its terms.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Minimised {
    /// The sum of the cross-entropy and all terms.
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
    /// Returns the terms that are present, with their names.
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
    /// The number of updates including this one and skipped updates. `loss` is measured before the update.
    pub step: usize,
    /// The mean cross-entropy over the tokens of the global batch, in nats per token. NaN if no token has a target.
    #[serde(with = "json_float")]
    pub loss: f64,
    /// The loss in bits per byte of text: see [`bits_per_byte`].
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
    /// The reason for skipping the update; absent in files of version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip_reason: Option<SkipReason>,
    /// The loss scale, if it is not 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// The number of zero gradient elements, if counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros: Option<u64>,
    /// The largest attention logit over all layers, heads, samples and ranks, if measured.
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
    /// The loss in bits per byte of text: see [`bits_per_byte`].
    #[serde(with = "json_float")]
    pub bits_per_byte: f64,
    /// The objective on held-out text, if it differs from the cross-entropy.
    #[serde(flatten)]
    pub minimised: Minimised,
    /// The number of tokens that have a loss.
    pub tokens: u64,
}

/// The time of one training step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepTiming {
    /// The number of updates including this one.
    pub step: usize,
    /// Wall time of the step, in seconds. If readings are [deferred](super::Trainer::defer_readings), the last step
    /// before an evaluation, a checkpoint or the end has the mean time of the steps since the previous such event.
    #[serde(with = "json_float")]
    pub seconds: f64,
    /// Tokens of the global batch per second.
    #[serde(with = "json_float")]
    pub tokens_per_second: f64,
    /// Floating-point operations of the model per second, over all ranks, without recomputation.
    #[serde(with = "json_float")]
    pub flops_per_second: f64,
}

/// The time of one checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SaveTiming {
    /// The number of updates before the checkpoint.
    pub saved_step: u64,
    /// The size of its tensors, in bytes.
    pub bytes: u64,
    /// Wall time until its publication, in seconds.
    #[serde(with = "json_float")]
    pub seconds: f64,
    /// The time for which it blocked training, in seconds.
    #[serde(with = "json_float")]
    pub stall_seconds: f64,
}

/// One record of a metrics file, tagged by the field `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MetricsRecord {
    /// Version of the file: `"kind": "run"`.
    Run(RunMetrics),
    /// Metrics of a training step: `"kind": "step"`.
    Step(StepMetrics),
    /// Loss on held-out text: `"kind": "held_out"`.
    HeldOut(HeldOutMetrics),
    /// Balance of the experts, written after the step: `"kind": "experts"`.
    Experts(ExpertSummary),
    /// Load of each expert, written after the step before an evaluation: `"kind": "expert_load"`.
    ExpertLoad(ExpertLoad),
}

/// Converts a loss in nats per token to bits per byte of text: `loss / (ln 2 * bytes_per_token)`.
///
/// A byte-level model has one byte per token.
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

/// An error of reading or writing a log.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// An I/O error.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// The attempted operation, as a verb.
        action: &'static str,
        /// The file.
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
        /// The file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        /// The error of the JSON parser.
        source: serde_json::Error,
    },
    /// The file has a newer version than this program supports.
    #[error(
        "'{path}' has metrics of version {version}: expected version 1 to {VERSION}; update this program"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
