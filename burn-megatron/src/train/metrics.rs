//! What a run measures, one JSON object per line.
//!
//! Two files keep apart what must repeat and what cannot: [`MetricsLog`] writes numbers that are
//! the same, byte for byte, in every run of one layout with one seed; [`TimingsLog`] writes what
//! depends on the clock. Both only ever grow: a run that goes on from a checkpoint writes a line of the
//! kind `resumed`, and what it makes again counts in place of what stands before.
//!
//! JSON has no NaN and no infinity. Such a number is written as one of the strings `"NaN"`, `"inf"`
//! and `"-inf"`, and read back as what it was; a loss that diverged can still be plotted and
//! searched for.
//!
//! The first line of a metrics file says its [`VERSION`]; files of version 1 have no such line. What
//! `loss` means depends on it.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::json_float;
use super::json_lines::{JsonLines, Marker, lines, read};

/// The version of a metrics file: what its numbers mean.
///
/// - 1: `loss` is what training minimised, with label smoothing and z-loss where they were on.
/// - 2: `loss` is the cross-entropy alone; what is minimised, where it is something else, stands beside
///   it ([`Minimised`]).
pub const VERSION: u32 = 2;

/// What the lines below it mean; the first line of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunMetrics {
    /// See [`VERSION`].
    pub version: u32,
}

/// What training minimises, where that is not the cross-entropy alone: the means over the same tokens
/// as those of the loss, in nats per token. The objective is the sum of the loss and its terms.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Minimised {
    /// The cross-entropy and all terms.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        with = "json_float::option"
    )]
    pub objective: Option<f64>,
    /// What label smoothing adds to the cross-entropy.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        with = "json_float::option"
    )]
    pub label_smoothing: Option<f64>,
    /// The z-loss, times its weight.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        with = "json_float::option"
    )]
    pub z_loss: Option<f64>,
}

impl Minimised {
    /// The terms that there are, by name.
    pub fn terms(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let terms = [
            ("label smoothing", self.label_smoothing),
            ("z-loss", self.z_loss),
        ];
        terms
            .into_iter()
            .filter_map(|(name, term)| Some((name, term?)))
    }
}

/// Why a step changed no weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// The loss or a gradient is not finite, or a guard has found a gradient.
    NotFinite,
    /// No target of the global batch counts, as all are masked: there is no loss.
    NoTargets,
}

/// One training step, as measured before its update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The number of the update, from 0; so `loss` is that of weights after `step` updates.
    pub step: usize,
    /// The mean cross-entropy over the tokens of the global batch, in nats per token. Not a number where
    /// none of them has a target.
    #[serde(with = "json_float")]
    pub loss: f64,
    /// The same loss in bits per byte of text: see [`bits_per_byte`].
    #[serde(with = "json_float")]
    pub bits_per_byte: f64,
    /// What is minimised, where that is something else.
    #[serde(flatten)]
    pub minimised: Minimised,
    /// The Euclidean norm of the gradient of all parameters, before clipping.
    #[serde(with = "json_float")]
    pub gradient_norm: f64,
    /// The learning rate of the update.
    #[serde(with = "json_float")]
    pub learning_rate: f64,
    /// The tokens of the global batch that the loss is the mean of.
    pub tokens: u64,
    /// Whether the update was left out, as for a gradient that is not finite.
    pub skipped: bool,
    /// Why it was; not known of files of version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip_reason: Option<SkipReason>,
    /// What the loss was multiplied with for its backward, where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// The elements of the gradient that are zero, where they are counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros: Option<u64>,
}

/// The loss on text that the model does not train on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HeldOutMetrics {
    /// The number of updates that the weights have had: 0 before the first.
    pub step: usize,
    /// The mean cross-entropy, in nats per token.
    #[serde(with = "json_float")]
    pub loss: f64,
    /// The same loss in bits per byte of text: see [`bits_per_byte`].
    #[serde(with = "json_float")]
    pub bits_per_byte: f64,
    /// What training minimises, of this text, where that is something else.
    #[serde(flatten)]
    pub minimised: Minimised,
    /// The tokens that the loss is the mean of.
    pub tokens: u64,
}

/// How long one training step took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepTiming {
    /// The number of the update, from 0.
    pub step: usize,
    /// Wall-clock time of the step, in seconds.
    #[serde(with = "json_float")]
    pub seconds: f64,
    /// Tokens of the global batch per second.
    #[serde(with = "json_float")]
    pub tokens_per_second: f64,
    /// Floating-point operations of the model per second, of all ranks together; what is recomputed
    /// does not count.
    #[serde(with = "json_float")]
    pub flops_per_second: f64,
}

/// How long one checkpoint took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SaveTiming {
    /// The number of updates that it was saved after.
    pub saved_step: u64,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Wall-clock time from its beginning to its publication, in seconds.
    #[serde(with = "json_float")]
    pub seconds: f64,
    /// How long training stood still for it, in seconds.
    #[serde(with = "json_float")]
    pub stall_seconds: f64,
}

/// One line of a file of timings.
#[derive(Deserialize)]
#[serde(untagged)]
#[expect(dead_code, reason = "they are read to see that they are ours")]
enum Timing {
    Save(SaveTiming),
    Step(StepTiming),
    Resumed(Marker),
}

/// One line of a metrics file.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line {
    Run(RunMetrics),
    Step(StepMetrics),
    HeldOut(HeldOutMetrics),
    /// A [`Marker`].
    Resumed {
        step: usize,
    },
}

/// One record of a metrics file; the field `kind` says which.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Record {
    /// `"kind": "run"`.
    Run(RunMetrics),
    /// `"kind": "step"`.
    Step(StepMetrics),
    /// `"kind": "held_out"`.
    HeldOut(HeldOutMetrics),
}

/// A loss in nats per token as bits per byte of text: `loss / (ln 2 * bytes_per_token)`.
///
/// A byte-level model has one byte per token.
pub fn bits_per_byte(loss: f64, bytes_per_token: f64) -> f64 {
    loss / (std::f64::consts::LN_2 * bytes_per_token)
}

/// Why a log cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The operating system refused.
    #[error("cannot {action} '{path}': {source}")]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason the operating system gives.
        source: io::Error,
    },
    /// A line is not one of ours.
    #[error("line {line} of '{path}' is not a record of metrics: {source}")]
    BadLine {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: usize,
        /// What the reader of JSON found.
        source: serde_json::Error,
    },
    /// A file of a newer program.
    #[error(
        "'{path}' has metrics of version {version}, and this program reads versions 1 to {VERSION}; a \
         newer one reads it"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
}

/// Writes `metrics.jsonl`: what repeats. See [`StepMetrics`] and [`HeldOutMetrics`].
#[derive(Debug)]
pub struct MetricsLog {
    lines: JsonLines,
    /// The last held-out loss that an interrupted run wrote.
    held_out: Option<usize>,
}

impl MetricsLog {
    /// Starts a new file.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`], also if the file exists: the results of another run are not
    /// overwritten.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        let mut lines = JsonLines::create(path)?;
        lines.write(&Record::Run(RunMetrics { version: VERSION }))?;
        Ok(Self {
            lines,
            held_out: None,
        })
    }

    /// Goes on with the file of an interrupted run, from the checkpoint after `updates` updates.
    ///
    /// Nothing is cut: a marker, `{"kind":"resumed","step":updates}`, says that what was written before
    /// of later steps counts no more, and [`read_metrics`] leaves it out; so it gives what it gives of a
    /// run without interruption. A last line that an interruption has torn is ended first. A file of an
    /// older version gets a line that says from where on it is of this one.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if there is no such file; [`MetricsError::BadLine`] if it is not one of
    /// ours.
    pub fn resume(path: &Path, updates: usize) -> Result<Self, MetricsError> {
        let text = read(path)?;
        let mut records = records(path, &text, true)?;
        go_back(&mut records, updates);
        let held_out = records.iter().rev().find_map(|record| match record {
            Record::HeldOut(metrics) => Some(metrics.step),
            _ => None,
        });
        let version = records.iter().rev().find_map(|record| match record {
            Record::Run(run) => Some(run.version),
            _ => None,
        });
        let mut lines = JsonLines::resume(path, &text, updates)?;
        if version.unwrap_or(1) < VERSION {
            lines.write(&Record::Run(RunMetrics { version: VERSION }))?;
        }
        Ok(Self { lines, held_out })
    }

    /// Appends one training step.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`].
    pub fn step(&mut self, metrics: &StepMetrics) -> Result<(), MetricsError> {
        self.lines.write(&Record::Step(*metrics))
    }

    /// Appends one measurement on held-out text.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`].
    pub fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), MetricsError> {
        match self.held_out == Some(metrics.step) {
            true => Ok(()),
            false => self.lines.write(&Record::HeldOut(*metrics)),
        }
    }
}

/// Writes `timings.jsonl`: what depends on the clock. See [`StepTiming`] and [`SaveTiming`].
#[derive(Debug)]
pub struct TimingsLog(JsonLines);

impl TimingsLog {
    /// Starts a new file.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`], also if the file exists.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        JsonLines::create(path).map(Self)
    }

    /// Goes on with the file of an interrupted run, from the checkpoint after `updates` updates, with a
    /// marker as that of [`MetricsLog::resume`]: what was written before of later steps was made again.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if there is no such file; [`MetricsError::BadLine`] if it is not one of
    /// ours.
    pub fn resume(path: &Path, updates: usize) -> Result<Self, MetricsError> {
        let text = read(path)?;
        for line in lines::<Timing>(path, &text, true) {
            line?;
        }
        JsonLines::resume(path, &text, updates).map(Self)
    }

    /// Appends one step.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`].
    pub fn step(&mut self, timing: &StepTiming) -> Result<(), MetricsError> {
        self.0.write(timing)
    }

    /// Appends one checkpoint.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`].
    pub fn save(&mut self, timing: &SaveTiming) -> Result<(), MetricsError> {
        self.0.write(timing)
    }
}

/// All records of a metrics file that count, in order: where a run went on from a checkpoint, those of the
/// steps that it made again are left out. A line that an interruption has torn is left out too: a last one
/// without an end, and one before a marker.
///
/// # Errors
///
/// [`MetricsError::Io`], [`MetricsError::BadLine`] or [`MetricsError::Version`].
pub fn read_metrics(path: &Path) -> Result<Vec<Record>, MetricsError> {
    records(path, &read(path)?, false)
}

/// The oldest version that records of a file are of: 1 where some stand before a line that says another.
pub fn oldest_version(records: &[Record]) -> u32 {
    match records.first() {
        Some(Record::Run(run)) => run.version,
        _ => 1,
    }
}

fn check_version(path: &Path, run: RunMetrics) -> Result<(), MetricsError> {
    if run.version > VERSION {
        return Err(MetricsError::Version {
            path: path.to_path_buf(),
            version: run.version,
        });
    }
    Ok(())
}

/// The records of `text` that its markers leave.
fn records(path: &Path, text: &str, resumes: bool) -> Result<Vec<Record>, MetricsError> {
    let mut records = vec![];
    for line in lines(path, text, resumes) {
        match line? {
            Line::Step(metrics) => records.push(Record::Step(metrics)),
            Line::HeldOut(metrics) => records.push(Record::HeldOut(metrics)),
            Line::Run(run) => {
                check_version(path, run)?;
                records.push(Record::Run(run));
            }
            Line::Resumed { step } => go_back(&mut records, step),
        }
    }
    Ok(records)
}

/// Leaves what a run knows that goes on after `updates` updates: training steps before, and held-out losses
/// up to then.
fn go_back(records: &mut Vec<Record>, updates: usize) {
    records.retain(|record| match record {
        Record::Step(metrics) => metrics.step < updates,
        Record::HeldOut(metrics) => metrics.step <= updates,
        Record::Run(_) => true,
    });
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
