//! Records the metrics of a run in the progress bar and in the files of the run folder.

use std::ops::Range;
use std::path::PathBuf;

use burn_megatron::nn::fp8::Fp8;
use burn_megatron::regular_file::is_there;
use burn_megatron_train::metrics::{
    HeldOutMetrics, MetricsLog, SaveTiming, SkipReason, StepMetrics, StepTiming, TimingsLog,
};
use burn_megatron_train::progress::Progress;
use burn_megatron_train::run_folder::RunFolder;
use burn_megatron_train::{ExpertMetrics, Observer, ObserverError, SavedCheckpoint};

use crate::error::Error;
use crate::recipe::Recipe;
use crate::resume::TrainStart;
use crate::save_hf::HfSaver;

/// Observer of one rank. Only rank 0 prints and writes.
pub struct Recorder {
    files: Option<(MetricsLog, TimingsLog)>,
    progress: Progress,
    stop: Box<dyn Fn() -> bool>,
    /// The recipe that replaces the one in the run folder once the first checkpoint is saved.
    config: Option<(RunFolder, Recipe)>,
    /// The first step of this run.
    first: usize,
    /// The total number of steps.
    steps: usize,
    /// The number of steps between evaluations.
    evaluate_every: Option<usize>,
    /// The layers whose quantization is measured in the last step.
    fp8: Option<Fp8>,
    /// Writes checkpoints as Hugging Face folders.
    hf: Option<HfSaver>,
}

impl Recorder {
    /// Opens the files of the run folder, if this rank writes them. `steps` is the range of steps of the run. The run
    /// also ends when `stop` returns true.
    pub fn new(
        rank: usize,
        steps: Range<usize>,
        start: Option<&TrainStart>,
        stop: Box<dyn Fn() -> bool>,
    ) -> Result<Self, Error> {
        Ok(Self {
            files: start.map(files).transpose()?,
            config: start.and_then(|start| Some((start.folder.clone(), start.config.clone()?))),
            first: steps.start,
            steps: steps.end,
            evaluate_every: None,
            progress: Progress::start(rank, steps),
            stop,
            fp8: None,
            hf: None,
        })
    }

    /// Sets the recipe that replaces the recipe of a continued run folder. It includes the measured choices.
    pub fn recording(mut self, recipe: &Recipe) -> Self {
        if let Some((_, config)) = &mut self.config {
            *config = recipe.clone();
        }
        self
    }

    /// Enables the measurement of the FP8 layers in the last step.
    pub fn measuring(mut self, fp8: &Fp8) -> Self {
        fp8.measure(self.first + 1 >= self.steps);
        self.fp8 = Some(fp8.clone());
        self
    }

    /// Enables writing checkpoints as Hugging Face folders.
    pub fn saving_hf(mut self, hf: Option<HfSaver>) -> Self {
        self.hf = hf;
        self
    }

    /// Sets the number of steps between evaluations. By default, the only evaluation is at the end.
    pub fn evaluating_every(mut self, steps: Option<usize>) -> Self {
        self.evaluate_every = steps;
        self
    }

    /// Sets the unit for a loss in bits.
    pub fn in_bits_per(mut self, unit: &'static str) -> Self {
        self.progress = self.progress.in_bits_per(unit);
        self
    }

    /// Returns whether an evaluation follows after `done` steps, in a run that is not stopped.
    fn is_evaluated(&self, done: usize) -> bool {
        let is_due = |every: usize| done.is_multiple_of(every);
        done == self.steps || self.evaluate_every.is_some_and(is_due)
    }

    /// Ends the progress bar. Returns the saver, which may still be writing.
    pub fn finish(mut self) -> Option<HfSaver> {
        self.progress.finish();
        self.hf
    }
}

/// Opens the files of the run folder. Creates new files, or truncates the files of a resumed run after its
/// checkpoint.
fn files(start: &TrainStart) -> Result<(MetricsLog, TimingsLog), Error> {
    let folder = &start.folder;
    let (metrics, timings) = (folder.metrics(), folder.timings());
    let kept = |path: &PathBuf| start.resumed_steps().filter(|_| is_there(path));
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

/// Describes why a step was skipped. `scale` is the loss scale.
fn skip_text(reason: SkipReason, scale: Option<f64>) -> String {
    match (reason, scale) {
        (SkipReason::NoTargets, _) => "all of its targets are masked".into(),
        (SkipReason::Spike, _) => "its loss or gradient norm is a spike (train.skip_spikes)".into(),
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
            fp8.measure(metrics.step + 1 >= self.steps);
        }
        if let Some(reason) = metrics.skip_reason {
            let reason = skip_text(reason, metrics.loss_scale);
            let note = format!("step {} skipped on every rank: {reason}", metrics.step);
            self.progress.note(&note);
        }
        if let Some((records, timings)) = &mut self.files {
            records.step(metrics)?;
            timings.step(timing)?;
        }
        Ok(())
    }

    fn experts(&mut self, metrics: &ExpertMetrics) -> Result<(), ObserverError> {
        self.progress.experts(metrics);
        let evaluates = self.is_evaluated(metrics.step);
        if let Some((records, _)) = &mut self.files {
            records.experts(metrics, evaluates)?;
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

    fn saved(&mut self, saved: &SavedCheckpoint) -> Result<(), ObserverError> {
        self.progress.note(&saved.to_string());
        if let Some((folder, recipe)) = self.config.take() {
            folder.replace_config(&recipe.complete())?;
        }
        if let Some(hf) = &mut self.hf {
            hf.save(&saved.path)?;
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
