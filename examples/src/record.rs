//! What rank 0 does with the numbers of a run: the progress bar and the run folder.

use burn_megatron::nn::fp8::Fp8;
use burn_megatron::train::metrics::{
    HeldOutMetrics, MetricsLog, StepMetrics, StepTiming, TimingsLog,
};
use burn_megatron::train::progress::Progress;
use burn_megatron::train::run_folder::RunFolder;
use burn_megatron::train::{Observer, ObserverError};

use crate::recipe::Error;

/// The observer of one rank; only rank 0 shows and writes.
pub struct Recorder {
    files: Option<(MetricsLog, TimingsLog)>,
    progress: Progress,
    stop: Box<dyn Fn() -> bool>,
    steps: usize,
    /// The layers that are measured in the last step.
    fp8: Option<Fp8>,
}

impl Recorder {
    /// Opens the files of the run folder, if this rank writes them; `stop` says when to end the run.
    pub fn new(
        rank: usize,
        steps: usize,
        folder: Option<&RunFolder>,
        stop: Box<dyn Fn() -> bool>,
    ) -> Result<Self, Error> {
        let create = |folder: &RunFolder| {
            let metrics = MetricsLog::create(&folder.metrics())?;
            Ok::<_, Error>((metrics, TimingsLog::create(&folder.timings())?))
        };
        let files = folder.map(create).transpose()?;
        let progress = Progress::start(rank, 0..steps);
        Ok(Self {
            files,
            progress,
            stop,
            steps,
            fp8: None,
        })
    }

    /// Lets 8-bit layers be measured in the last step.
    pub fn measuring(mut self, fp8: &Fp8) -> Self {
        fp8.measure(self.steps <= 1);
        self.fp8 = Some(fp8.clone());
        self
    }

    /// Ends the bar.
    pub fn finish(mut self) {
        self.progress.finish();
    }
}

impl Observer for Recorder {
    fn step(&mut self, metrics: &StepMetrics, timing: &StepTiming) -> Result<(), ObserverError> {
        self.progress.step(metrics, timing);
        if let Some(fp8) = &self.fp8 {
            fp8.measure(metrics.step + 2 >= self.steps);
        }
        if metrics.skipped {
            let scale = metrics.loss_scale;
            let scale = scale.map(|scale| format!(" at a loss scale of {scale}"));
            self.progress.note(&format!(
                "step {}: skipped on every rank, as the loss or a gradient is not finite{}",
                metrics.step + 1,
                scale.unwrap_or_default(),
            ));
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

    fn stop(&self) -> bool {
        (self.stop)()
    }
}
