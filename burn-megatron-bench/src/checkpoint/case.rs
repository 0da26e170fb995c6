//! Trains a model, and measures how long saving and loading its checkpoints takes.

use std::fs;
use std::path::Path;
use std::time::Instant;

use burn::tensor::Device;
use burn_megatron::checkpoint::{Checkpoint, LoadTolerance, Retention};
use burn_megatron::comm::{ParallelContext, Rank};
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron_data::TextData;
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{
    NoopObserver, Observer, ObserverError, SaveConfig, SavedCheckpoint, Saver, TrainConfig, Trainer,
};

use super::{CheckpointBenchArgs, files};
use crate::links::on_threads;
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::median;

/// The number of tokens in a sample. It is small, because only the effect of saving on training is measured.
const TOKENS: usize = 64;

/// The model, the flags and the folder of the benchmark.
pub struct CheckpointBench<'a> {
    pub args: &'a CheckpointBenchArgs,
    pub model: TransformerConfig,
    /// The number of steps between two asynchronous checkpoints.
    pub every: usize,
    /// The folder of this benchmark.
    pub folder: &'a Path,
}

/// The measured times in seconds, one value per sample.
#[derive(Debug, Default)]
pub struct CheckpointTimings {
    /// The size of a checkpoint in bytes.
    pub bytes: u64,
    pub save: Vec<f64>,
    pub copy: Vec<f64>,
    pub load: Vec<f64>,
    pub read: Vec<f64>,
    /// The time from the start of an asynchronous save to the publication of the checkpoint.
    pub write: Vec<f64>,
    /// The time for which an asynchronous save stalled training.
    pub stall: Vec<f64>,
    /// The additional time of the training steps that ran during an asynchronous save.
    pub slower: Vec<f64>,
    /// The time of training steps that run while no checkpoint is written.
    pub step: Vec<f64>,
}

impl CheckpointBench<'_> {
    /// Runs the measurement and returns the timings of rank 0.
    pub fn run(&self) -> Result<CheckpointTimings, Error> {
        let text = self.folder.join("text");
        fs::write(
            &text,
            "All work and no play makes Jack a dull boy.\n".repeat(1000),
        )?;
        let text = TextData::open(&text)?;
        let mut records = on_threads(self.args.data_parallel, |rank| self.measure(rank, &text))?;
        Ok(records.swap_remove(0))
    }

    fn measure(&self, rank: &Rank, text: &TextData) -> Result<CheckpointTimings, Error> {
        let groups = ParallelContext::new(
            &ParallelConfig::new().with_data(self.args.data_parallel),
            rank,
        )?;
        let mut record = CheckpointTimings::default();
        self.measure_foreground(&groups, text, &mut record)?;
        self.measure_background(&groups, text, &mut record)?;
        Ok(record)
    }

    fn trainer(
        &self,
        groups: &ParallelContext,
        steps: usize,
    ) -> Result<Trainer<Transformer>, Error> {
        let device = Device::flex();
        let model = self.model.init(groups, &device)?;
        let config = TrainConfig {
            steps,
            warmup_steps: 1,
            micro_batch_size: 1,
            global_batch_size: self.args.data_parallel,
            sequence_length: Some(TOKENS),
            held_out_samples: 1,
            data_parallel: DataParallelConfig {
                zero_stage: self.args.zero_stage,
                ..DataParallelConfig::default()
            },
            ..TrainConfig::default()
        };
        Ok(Trainer::new(model, groups, &device, &config)?)
    }

    fn saver(
        &self,
        groups: &ParallelContext,
        name: &str,
        every: Option<usize>,
    ) -> Result<Saver, Error> {
        let saving = SaveConfig {
            every: every.map(|steps| steps as u64),
            asynchronous: every.is_some(),
            keep: Retention {
                last: every.map(|_| 1),
                every: None,
            },
            ..SaveConfig::into_folder(self.folder.join(name))
        };
        Ok(Saver::open(saving, groups)?)
    }

    /// Measures saving, copying, loading and reading the same number of bytes, in several rounds. The first round is a
    /// warm-up.
    fn measure_foreground(
        &self,
        groups: &ParallelContext,
        text: &TextData,
        record: &mut CheckpointTimings,
    ) -> Result<(), Error> {
        let world = groups.world();
        let mut trainer = self.trainer(groups, self.args.repeats + 1)?;
        trainer.save_with(self.saver(groups, "in-turns", None)?);
        let samples = text.samples(TOKENS, 1)?;
        for round in 0..=self.args.repeats {
            trainer.step(&samples, &mut NoopObserver)?;
            world.barrier()?;
            let (saved, save) = timed(|| Ok(trainer.save()?))?;
            let path = saved.last().map(|saved| saved.path.clone());
            let checkpoint = match &path {
                Some(path) => path.clone(),
                None => Checkpoint::open(self.folder.join("in-turns"))?
                    .path()
                    .to_path_buf(),
            };
            let plain = |what: &dyn Fn() -> Result<(), Error>| match groups.rank() {
                0 => Ok(timed(what)?.1),
                _ => Ok::<_, Error>(0.0),
            };
            let to = self.folder.join("copy");
            let copy = plain(&|| files::copy(&checkpoint, &to))?;
            world.barrier()?;
            let load = || {
                let checkpoint = Checkpoint::open(&checkpoint)?;
                Ok(trainer.load(&checkpoint, LoadTolerance::default())?)
            };
            let ((), load) = timed(load)?;
            world.barrier()?;
            let read = plain(&|| files::read(&checkpoint))?;
            if groups.rank() == 0 {
                record.bytes = files::bytes(&checkpoint)?;
                fs::remove_dir_all(&to)?;
                // A copy removes nothing. If a save had to remove older checkpoints, it would do more work than the
                // copy.
                fs::remove_dir_all(&checkpoint)?;
            }
            if round > 0 {
                record.save.push(save);
                record.copy.push(copy);
                record.load.push(load);
                record.read.push(read);
            }
        }
        Ok(())
    }

    /// Continues training while checkpoints are written.
    fn measure_background(
        &self,
        groups: &ParallelContext,
        text: &TextData,
        record: &mut CheckpointTimings,
    ) -> Result<(), Error> {
        let steps = self.every * (self.args.repeats + 1);
        let mut trainer = self.trainer(groups, steps)?;
        trainer.save_with(self.saver(groups, "background", Some(self.every))?);
        let mut observer = SaveObserver::new(self.every);
        trainer.fit(text, &mut observer)?;
        observer.add_to(record);
        Ok(())
    }
}

fn timed<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<(T, f64), Error> {
    let started = Instant::now();
    let done = work()?;
    Ok((done, started.elapsed().as_secs_f64()))
}

/// Records the steps that ran while a checkpoint was written.
struct SaveObserver {
    every: usize,
    /// Seconds of each step.
    steps: Vec<f64>,
    /// Each checkpoint, with the number of steps that were complete when it was published.
    saved: Vec<(usize, SavedCheckpoint)>,
}

impl SaveObserver {
    fn new(every: usize) -> Self {
        Self {
            every,
            steps: vec![],
            saved: vec![],
        }
    }

    fn add_to(self, record: &mut CheckpointTimings) {
        // The checkpoint of the last step is not written during training.
        let last = self.steps.len() as u64;
        let saved = self.saved.iter().filter(|(_, saved)| saved.step < last);
        let saved: Vec<_> = saved.collect();
        let is_busy = |step: usize| {
            let within = |(end, saved): &&(usize, SavedCheckpoint)| {
                (saved.step as usize..*end).contains(&step)
            };
            saved.iter().any(within)
        };
        // The first steps fill the memory pools.
        let numbers = self.every / 2..self.steps.len();
        record.step = numbers
            .filter(|step| !is_busy(*step))
            .map(|step| self.steps[step])
            .collect();
        let usual = if record.step.is_empty() {
            f64::NAN
        } else {
            median(&record.step)
        };
        for (end, saved) in saved {
            let during = &self.steps[saved.step as usize..*end];
            record.write.push(saved.seconds);
            record.stall.push(saved.stall_seconds);
            let slower = during.iter().map(|seconds| seconds - usual);
            record.slower.push(slower.sum());
        }
    }
}

impl Observer for SaveObserver {
    fn step(&mut self, _: &StepMetrics, timing: &StepTiming) -> Result<(), ObserverError> {
        self.steps.push(timing.seconds);
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }

    fn saved(&mut self, saved: &SavedCheckpoint) -> Result<(), ObserverError> {
        self.saved.push((self.steps.len(), saved.clone()));
        Ok(())
    }
}
