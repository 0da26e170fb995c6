//! Reads the records of a metrics file.

use std::path::Path;

use serde::Deserialize;

use super::{HeldOutMetrics, MetricsError, MetricsRecord, RunMetrics, StepMetrics, VERSION};
use crate::expert_metrics::{ExpertLoad, ExpertSummary};
use crate::json_lines::{lines, read};

/// The last version whose steps were numbered from 0.
const FROM_ZERO: u32 = 2;

/// One line of a metrics file.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum MetricsLine {
    Run(RunMetrics),
    Step(StepMetrics),
    HeldOut(HeldOutMetrics),
    Experts(ExpertSummary),
    ExpertLoad(ExpertLoad),
    /// A [`ResumeMarker`](crate::json_lines::ResumeMarker).
    Resumed {
        step: usize,
    },
}

/// Reads the valid records of a metrics file, in order. Truncated lines are omitted, and so are records of steps that a
/// resumed run has repeated. A line is truncated if it has no line break, or if it is not a record and a marker of a
/// resumed run follows.
///
/// # Errors
///
/// [`MetricsError::Io`] if the file cannot be read; [`MetricsError::BadLine`] if a line is not a record;
/// [`MetricsError::Version`] if the file has a newer version than this library supports.
pub fn read_metrics(path: &Path) -> Result<Vec<MetricsRecord>, MetricsError> {
    records(path, &read(path)?, false)
}

/// Returns the oldest version in the records of a file. It is 1 if the first record does not contain a version.
pub fn oldest_version(records: &[MetricsRecord]) -> u32 {
    match records.first() {
        Some(MetricsRecord::Run(run)) => run.version,
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

/// Returns the valid records of `text`, after its markers are applied.
pub(super) fn records(
    path: &Path,
    text: &[u8],
    resumes: bool,
) -> Result<Vec<MetricsRecord>, MetricsError> {
    let (mut records, mut version) = (vec![], 1);
    for line in lines(path, text, resumes) {
        let line = line?;
        let first = usize::from(version <= FROM_ZERO);
        let from_one = |step: &mut usize| *step = step.saturating_add(first);
        match line {
            MetricsLine::Step(mut metrics) => {
                from_one(&mut metrics.step);
                records.push(MetricsRecord::Step(metrics));
            }
            MetricsLine::HeldOut(metrics) => records.push(MetricsRecord::HeldOut(metrics)),
            MetricsLine::Experts(mut summary) => {
                from_one(&mut summary.step);
                records.push(MetricsRecord::Experts(summary));
            }
            MetricsLine::ExpertLoad(mut load) => {
                from_one(&mut load.step);
                records.push(MetricsRecord::ExpertLoad(load));
            }
            MetricsLine::Run(run) => {
                check_version(path, run)?;
                version = run.version;
                records.push(MetricsRecord::Run(run));
            }
            MetricsLine::Resumed { step } => drop_after(&mut records, step),
        }
    }
    Ok(records)
}

/// Removes the records that a run resumed after `updates` updates repeats: later training steps with their experts, and
/// later held-out losses.
pub(super) fn drop_after(records: &mut Vec<MetricsRecord>, updates: usize) {
    records.retain(|record| match record {
        MetricsRecord::Step(metrics) => metrics.step <= updates,
        MetricsRecord::HeldOut(metrics) => metrics.step <= updates,
        MetricsRecord::Experts(summary) => summary.step <= updates,
        MetricsRecord::ExpertLoad(load) => load.step <= updates,
        MetricsRecord::Run(_) => true,
    });
}
