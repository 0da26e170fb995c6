//! What rank 0 does with the numbers of a run: the progress bar and the run folder.

use std::ops::Range;
use std::path::PathBuf;

use burn_megatron::nn::fp8::Fp8;
use burn_megatron::train::metrics::{
    HeldOutMetrics, MetricsLog, SaveTiming, SkipReason, StepMetrics, StepTiming, TimingsLog,
};
use burn_megatron::train::progress::Progress;
use burn_megatron::train::run_folder::RunFolder;
use burn_megatron::train::{Observer, ObserverError, Saved};

use crate::recipe::{Error, Recipe};
use crate::start::Start;

/// The observer of one rank; only rank 0 shows and writes.
pub struct Recorder {
    files: Option<(MetricsLog, TimingsLog)>,
    progress: Progress,
    stop: Box<dyn Fn() -> bool>,
    /// What takes the place of the settings in the run folder with the first checkpoint.
    config: Option<(RunFolder, Recipe)>,
    /// The steps before this run.
    first: usize,
    /// The steps at its end.
    steps: usize,
    /// The layers that are measured in the last step.
    fp8: Option<Fp8>,
}

impl Recorder {
    /// Opens the files of the run folder, if this rank writes them; `stop` says when to end the run of
    /// the updates `steps`.
    pub fn new(
        rank: usize,
        steps: Range<usize>,
        start: Option<&Start>,
        stop: Box<dyn Fn() -> bool>,
    ) -> Result<Self, Error> {
        Ok(Self {
            files: start.map(files).transpose()?,
            config: start.and_then(|start| Some((start.folder.clone(), start.config.clone()?))),
            first: steps.start,
            steps: steps.end,
            progress: Progress::start(rank, steps),
            stop,
            fp8: None,
        })
    }

    /// Lets 8-bit layers be measured in the last step.
    pub fn measuring(mut self, fp8: &Fp8) -> Self {
        fp8.measure(self.first + 1 >= self.steps);
        self.fp8 = Some(fp8.clone());
        self
    }

    /// Says what the bits of a loss are per.
    pub fn in_bits_per(mut self, unit: &'static str) -> Self {
        self.progress = self.progress.in_bits_per(unit);
        self
    }

    /// Ends the bar.
    pub fn finish(mut self) {
        self.progress.finish();
    }
}

/// The files of the run folder: new ones, or those of an interrupted run, which go on after its checkpoint.
fn files(start: &Start) -> Result<(MetricsLog, TimingsLog), Error> {
    let folder = &start.folder;
    let (metrics, timings) = (folder.metrics(), folder.timings());
    let kept = |path: &PathBuf| start.kept_steps().filter(|_| path.exists());
    Ok((
        match kept(&metrics) {
            Some(steps) => MetricsLog::resume(&metrics, steps)?,
            None => MetricsLog::create(&metrics)?,
        },
        match kept(&timings) {
            Some(steps) => TimingsLog::resume(&timings, steps)?,
            None => TimingsLog::create(&timings)?,
        },
    ))
}

/// Why a step was skipped, at a loss scale.
fn because(reason: SkipReason, scale: Option<f64>) -> String {
    match (reason, scale) {
        (SkipReason::NoTargets, _) => "none of its targets counts: all are masked".into(),
        (SkipReason::NotFinite, None) => "the loss or a gradient is not finite".into(),
        (SkipReason::NotFinite, Some(scale)) => {
            format!("the loss or a gradient is not finite at a loss scale of {scale}")
        }
    }
}

impl Observer for Recorder {
    fn step(&mut self, metrics: &StepMetrics, timing: &StepTiming) -> Result<(), ObserverError> {
        self.progress.step(metrics, timing);
        if let Some(fp8) = &self.fp8 {
            fp8.measure(metrics.step + 2 >= self.steps);
        }
        if let Some(reason) = metrics.skip_reason {
            let number = metrics.step + 1;
            let reason = because(reason, metrics.loss_scale);
            let note = format!("step {number}: skipped on every rank, as {reason}");
            self.progress.note(&note);
        }
        if let Some((records, timings)) = &mut self.files {
            records.step(metrics)?;
            timings.step(timing)?;
        }
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.progress.held_out(metrics);
        if let Some((records, _)) = &mut self.files {
            records.held_out(metrics)?;
        }
        Ok(())
    }

    fn saved(&mut self, saved: &Saved) -> Result<(), ObserverError> {
        self.progress.note(&saved.to_string());
        if let Some((folder, recipe)) = self.config.take() {
            folder.replace_config(&recipe)?;
        }
        if let Some((_, timings)) = &mut self.files {
            timings.save(&SaveTiming {
                saved_step: saved.step,
                bytes: saved.bytes,
                seconds: saved.seconds,
                stall_seconds: saved.stall_seconds,
            })?;
        }
        Ok(())
    }

    fn stop(&self) -> bool {
        (self.stop)()
    }
}
