//! What a run measures, one JSON object per line.
//!
//! Two files keep apart what must repeat and what cannot: [`MetricsLog`] writes numbers that are
//! the same, byte for byte, in every run of one layout with one seed; [`TimingsLog`] writes what
//! depends on the clock.
//!
//! JSON has no NaN and no infinity. Such a number is written as one of the strings `"NaN"`, `"inf"`
//! and `"-inf"`, and read back as what it was; a loss that diverged can still be plotted and
//! searched for.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// One training step, as measured before its update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The number of the update, from 0; so `loss` is that of weights after `step` updates.
    pub step: usize,
    /// The mean cross-entropy over the tokens of the global batch, in nats per token.
    #[serde(with = "json_float")]
    pub loss: f64,
    /// The same loss in bits per byte of text: see [`bits_per_byte`].
    #[serde(with = "json_float")]
    pub bits_per_byte: f64,
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
enum Timing {
    Save(SaveTiming),
    Step(StepTiming),
}

/// One line of a metrics file; the field `kind` says which.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Record {
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
        JsonLines::create(path).map(|lines| Self {
            lines,
            held_out: None,
        })
    }

    /// Goes on with a file whose run was interrupted, from the checkpoint after `updates` updates.
    ///
    /// What the interrupted run wrote later than that is cut off, a torn last line included, so
    /// that the finished file equals that of a run without interruption. Training steps before
    /// `updates` and held-out losses up to `updates` stay, and are not written again.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if there is no such file; [`MetricsError::BadLine`] if it is not one of
    /// ours.
    pub fn resume(path: &Path, updates: usize) -> Result<Self, MetricsError> {
        let text = read(path)?;
        let (mut kept, mut held_out) = (0, None);
        for (record, end) in lines(path, &text) {
            match record? {
                Record::Step(metrics) if metrics.step < updates => {}
                Record::HeldOut(metrics) if metrics.step <= updates => {
                    held_out = Some(metrics.step);
                }
                Record::Step(_) | Record::HeldOut(_) => break,
            }
            kept = end;
        }
        let lines = JsonLines::reopen(path, kept as u64)?;
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

    /// Goes on with the file of an interrupted run, from the checkpoint after `updates` updates. What
    /// it wrote later than that is cut off, a torn last line included.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if there is no such file; [`MetricsError::BadLine`] if it is not one of
    /// ours.
    pub fn resume(path: &Path, updates: usize) -> Result<Self, MetricsError> {
        let text = read(path)?;
        let mut kept = 0;
        for (timing, end) in lines::<Timing>(path, &text) {
            let stays = match timing? {
                Timing::Save(save) => save.saved_step <= updates as u64,
                Timing::Step(step) => step.step < updates,
            };
            if !stays {
                break;
            }
            kept = end;
        }
        JsonLines::reopen(path, kept as u64).map(Self)
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

/// All records of a metrics file, in order. A last line without an end, torn by an interruption, is
/// left out.
///
/// # Errors
///
/// [`MetricsError::Io`] or [`MetricsError::BadLine`].
pub fn read_metrics(path: &Path) -> Result<Vec<Record>, MetricsError> {
    lines(path, &read(path)?)
        .map(|(record, _)| record)
        .collect()
}

/// The records of `text` and the byte at which the line of each ends.
fn lines<'a, T: DeserializeOwned>(
    path: &'a Path,
    text: &'a str,
) -> impl Iterator<Item = (Result<T, MetricsError>, usize)> + 'a {
    let lines = text
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'));
    lines.enumerate().scan(0, move |end, (number, line)| {
        *end += line.len();
        let record = serde_json::from_str(line).map_err(|source| MetricsError::BadLine {
            path: path.to_path_buf(),
            line: number + 1,
            source,
        });
        Some((record, *end))
    })
}

fn read(path: &Path) -> Result<String, MetricsError> {
    std::fs::read_to_string(path).map_err(|source| io_error("read", path, source))
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> MetricsError {
    MetricsError::Io {
        action,
        path: path.to_path_buf(),
        source,
    }
}

/// A file that grows by whole lines, each with the operating system as soon as it is written: a run
/// that is killed loses none.
#[derive(Debug)]
struct JsonLines {
    file: File,
    path: PathBuf,
}

impl JsonLines {
    fn create(path: &Path) -> Result<Self, MetricsError> {
        let file = OpenOptions::new().append(true).create_new(true).open(path);
        let file = file.map_err(|source| io_error("create", path, source))?;
        Ok(Self {
            file,
            path: path.to_path_buf(),
        })
    }

    /// Opens an existing file and cuts it to `length` bytes.
    fn reopen(path: &Path, length: u64) -> Result<Self, MetricsError> {
        let file = OpenOptions::new().append(true).open(path);
        let file = file.map_err(|source| io_error("open", path, source))?;
        file.set_len(length)
            .map_err(|source| io_error("truncate", path, source))?;
        Ok(Self {
            file,
            path: path.to_path_buf(),
        })
    }

    fn write(&mut self, record: &impl Serialize) -> Result<(), MetricsError> {
        let failed = |source| io_error("write to", &self.path, source);
        let mut line = serde_json::to_vec(record).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        // One unbuffered write: the line is flushed when it returns.
        self.file.write_all(&line).map_err(failed)
    }
}

/// Floats in JSON: numbers where they are finite, else strings.
mod json_float {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        if value.is_finite() {
            serializer.serialize_f64(*value)
        } else {
            serializer.collect_str(value)
        }
    }

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Value {
        Number(f64),
        Text(String),
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Number(number) => Ok(number),
            Value::Text(text) => match text.as_str() {
                "NaN" => Ok(f64::NAN),
                "inf" => Ok(f64::INFINITY),
                "-inf" => Ok(f64::NEG_INFINITY),
                other => Err(D::Error::custom(format!("'{other}' is not a number"))),
            },
        }
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
