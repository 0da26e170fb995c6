//! Writes the metrics file and the timings file of a run.

use std::path::Path;

use serde::Deserialize;

use super::read::{drop_after, records};
use super::{
    HeldOutMetrics, MetricsError, MetricsRecord, RunMetrics, SaveTiming, StepMetrics, StepTiming,
    VERSION,
};
use crate::expert_metrics::{ExpertLoad, ExpertMetrics};
use crate::json_lines::{JsonLines, ResumeMarker, lines, read};

/// One line of a timings file.
#[derive(Deserialize)]
#[serde(untagged)]
enum TimingsLine {
    Save(SaveTiming),
    Step(#[expect(dead_code, reason = "parsed only to validate the file")] StepTiming),
    Resumed(ResumeMarker),
}

/// The writer of `metrics.jsonl`, which contains [`StepMetrics`], [`HeldOutMetrics`] and [`ExpertMetrics`].
///
/// ```
/// use burn_megatron_train::metrics::{MetricsLog, MetricsRecord, StepMetrics, read_metrics};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("metrics.jsonl");
/// let mut log = MetricsLog::create(&path)?;
/// for step in 1..=3 {
///     let loss = 5.0 - step as f64;
///     log.step(&StepMetrics { step, loss, ..StepMetrics::default() })?;
/// }
/// let losses = read_metrics(&path)?.into_iter().filter_map(|record| match record {
///     MetricsRecord::Step(step) => Some(step.loss),
///     _ => None,
/// });
/// assert_eq!(losses.collect::<Vec<_>>(), [4.0, 3.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MetricsLog {
    lines: JsonLines,
    /// The step of the last held-out loss before the run was interrupted.
    held_out: Option<usize>,
    /// The expert load of the last step, if it is not written yet.
    load: Option<ExpertLoad>,
}

impl MetricsLog {
    /// Creates a new file at `path`.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if the file cannot be created or already exists. Results are never overwritten.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        let mut lines = JsonLines::create(path)?;
        lines.write(&MetricsRecord::Run(RunMetrics { version: VERSION }))?;
        Ok(Self {
            lines,
            held_out: None,
            load: None,
        })
    }

    /// Opens the metrics file of an interrupted run, to resume the run. `updates` is the number of updates in the
    /// checkpoint from which the run resumes.
    ///
    /// No line is removed. Instead, a marker `{"kind":"resumed","step":updates}` is appended, which invalidates the
    /// earlier lines of later steps. [`read_metrics`](super::read_metrics) omits these lines, so it returns the same
    /// records as for an uninterrupted run. If the last line is truncated, a line break is added first. If the file has
    /// an older version, a new version line is appended.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if the file does not exist; [`MetricsError::BadLine`] if a line is not a record.
    pub fn resume(path: &Path, updates: usize) -> Result<Self, MetricsError> {
        let text = read(path)?;
        let mut records = records(path, &text, true)?;
        drop_after(&mut records, updates);
        let held_out = records.iter().rev().find_map(|record| match record {
            MetricsRecord::HeldOut(metrics) => Some(metrics.step),
            _ => None,
        });
        let version = records.iter().rev().find_map(|record| match record {
            MetricsRecord::Run(run) => Some(run.version),
            _ => None,
        });
        let mut lines = JsonLines::resume(path, &text, updates)?;
        if version.unwrap_or(1) < VERSION {
            lines.write(&MetricsRecord::Run(RunMetrics { version: VERSION }))?;
        }
        Ok(Self {
            lines,
            held_out,
            load: None,
        })
    }

    /// Appends the metrics of one training step.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if the file cannot be written.
    pub fn step(&mut self, metrics: &StepMetrics) -> Result<(), MetricsError> {
        self.lines.write(&MetricsRecord::Step(*metrics))
    }

    /// Appends the summary of the experts in one training step. If `evaluates` is true, the load of each expert is also
    /// appended.
    ///
    /// Set `evaluates` if an evaluation follows the step. The load is then written before a checkpoint of the same step
    /// is saved, because a run that resumes from this checkpoint cannot measure the load again. If `evaluates` is
    /// false, the load is written when [`held_out`](Self::held_out) is called before the next step.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if the file cannot be written.
    pub fn experts(
        &mut self,
        metrics: &ExpertMetrics,
        evaluates: bool,
    ) -> Result<(), MetricsError> {
        self.lines
            .write(&MetricsRecord::Experts(metrics.summary()))?;
        self.load = Some(metrics.load());
        if evaluates { self.write_load() } else { Ok(()) }
    }

    fn write_load(&mut self) -> Result<(), MetricsError> {
        match self.load.take() {
            Some(load) => self.lines.write(&MetricsRecord::ExpertLoad(load)),
            None => Ok(()),
        }
    }

    /// Appends the metrics of one evaluation on held-out text.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if the file cannot be written.
    pub fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), MetricsError> {
        self.write_load()?;
        if self.held_out == Some(metrics.step) {
            Ok(())
        } else {
            self.lines.write(&MetricsRecord::HeldOut(*metrics))
        }
    }
}

/// Returns the step of the last checkpoint in a timings file. Checkpoints that a resumed run has discarded are ignored.
///
/// # Errors
///
/// [`MetricsError::Io`] if the file cannot be read; [`MetricsError::BadLine`] if a line is not a record.
pub fn last_saved_step(path: &Path) -> Result<Option<u64>, MetricsError> {
    let text = read(path)?;
    let mut saved = vec![];
    for line in lines::<TimingsLine>(path, &text, false) {
        match line? {
            TimingsLine::Save(timing) => saved.push(timing.saved_step),
            TimingsLine::Step(_) => {}
            TimingsLine::Resumed(ResumeMarker { step, .. }) => {
                saved.retain(|saved| *saved <= step as u64);
            }
        }
    }
    Ok(saved.pop())
}

/// The writer of `timings.jsonl`, which contains [`StepTiming`] and [`SaveTiming`].
#[derive(Debug)]
pub struct TimingsLog(JsonLines);

impl TimingsLog {
    /// Creates a new file at `path`.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if the file cannot be created or already exists.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        JsonLines::create(path).map(Self)
    }

    /// Opens the metrics file of an interrupted run to resume the run, and appends the same marker as
    /// [`MetricsLog::resume`].
    /// `updates` is the number of updates in the checkpoint from which the run resumes.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if the file does not exist; [`MetricsError::BadLine`] if a line is not a record.
    pub fn resume(path: &Path, updates: usize) -> Result<Self, MetricsError> {
        let text = read(path)?;
        for line in lines::<TimingsLine>(path, &text, true) {
            line?;
        }
        JsonLines::resume(path, &text, updates).map(Self)
    }

    /// Appends the time of one training step.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if the file cannot be written.
    pub fn step(&mut self, timing: &StepTiming) -> Result<(), MetricsError> {
        self.0.write(timing)
    }

    /// Appends the time of one checkpoint.
    ///
    /// # Errors
    ///
    /// [`MetricsError::Io`] if the file cannot be written.
    pub fn save(&mut self, timing: &SaveTiming) -> Result<(), MetricsError> {
        self.0.write(timing)
    }
}
