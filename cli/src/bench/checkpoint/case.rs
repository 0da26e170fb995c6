//! A model that is trained, saved and loaded.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::Device;
use burn_megatron::checkpoint::{Checkpoint, Leniency, Retention};
use burn_megatron::comm::{Groups, Rank, World};
use burn_megatron::data::TextData;
use burn_megatron::data_parallel::{DataParallelConfig, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::Scope;
use burn_megatron::train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron::train::{Observer, ObserverError, Saved, Saver, Saving, TrainConfig, Trainer};
use burn_megatron_models::{Transformer, TransformerConfig};

use super::files;
use crate::bench::timing::median;
use crate::recipe::Error;

/// Tokens of a sample: few, as training is only there to be disturbed.
const TOKENS: usize = 64;

/// What is saved, and how often.
pub struct Setup {
    pub model: TransformerConfig,
    pub ranks: usize,
    pub zero_stage: ZeroStage,
    pub samples: usize,
    /// Steps between two checkpoints that are written while training goes on.
    pub every: usize,
    /// A folder of this run alone.
    pub folder: PathBuf,
}

/// Seconds, of each sample.
#[derive(Debug, Default)]
pub struct Record {
    /// Bytes of a checkpoint.
    pub bytes: u64,
    pub save: Vec<f64>,
    pub copy: Vec<f64>,
    pub load: Vec<f64>,
    pub read: Vec<f64>,
    /// Asynchronous: from the beginning to the publication.
    pub write: Vec<f64>,
    /// How long training stood still for it.
    pub stall: Vec<f64>,
    /// What the steps took longer, until it was published.
    pub slower: Vec<f64>,
    /// Steps while nothing was written.
    pub step: Vec<f64>,
}

impl Setup {
    /// Measures, and gives what rank 0 saw.
    pub fn run(&self) -> Result<Record, Error> {
        let text = self.folder.join("text");
        fs::write(
            &text,
            "All work and no play makes Jack a dull boy.\n".repeat(1000),
        )?;
        let text = TextData::open(&text)?;
        let world = World::threads(self.ranks)?.compute_threads(1);
        let mut records = world.run(|rank| self.measure(&rank, &text))?;
        Ok(records.swap_remove(0))
    }

    fn measure(&self, rank: &Rank, text: &TextData) -> Result<Record, Error> {
        let groups = Groups::new(&ParallelConfig::new().with_data(self.ranks), rank)?;
        let mut record = Record::default();
        self.in_turns(&groups, text, &mut record)?;
        self.in_the_background(&groups, text, &mut record)?;
        Ok(record)
    }

    fn trainer(&self, groups: &Groups, steps: usize) -> Result<Trainer<Transformer>, Error> {
        let device = Device::flex();
        let model = self.model.init(Scope::new(groups, &device), false)?;
        let config = TrainConfig {
            steps,
            warmup_steps: 1,
            micro_batch_size: 1,
            global_batch_size: self.ranks,
            sequence_length: Some(TOKENS),
            held_out_samples: 1,
            data_parallel: DataParallelConfig {
                zero_stage: self.zero_stage,
                ..DataParallelConfig::default()
            },
            ..TrainConfig::default()
        };
        Ok(Trainer::new(model, groups, &device, &config)?)
    }

    fn saver(&self, groups: &Groups, name: &str, every: Option<usize>) -> Result<Saver, Error> {
        let saving = Saving {
            every: every.map(|steps| steps as u64),
            asynchronous: every.is_some(),
            keep: Retention {
                last: every.map(|_| 1),
                every: None,
            },
            ..Saving::into_folder(self.folder.join(name))
        };
        Ok(Saver::open(saving, groups)?)
    }

    /// A save, a copy, a load and a read of the same bytes, again and again; the first round warms up.
    fn in_turns(&self, groups: &Groups, text: &TextData, record: &mut Record) -> Result<(), Error> {
        let world = groups.world();
        let mut trainer = self.trainer(groups, self.samples + 1)?;
        trainer.save_with(self.saver(groups, "in-turns", None)?);
        let samples = text.samples(TOKENS, 1)?;
        for round in 0..=self.samples {
            trainer.step(&samples)?;
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
                Ok(trainer.load(&checkpoint, Leniency::default())?)
            };
            let ((), load) = timed(load)?;
            world.barrier()?;
            let read = plain(&|| files::read(&checkpoint))?;
            if groups.rank() == 0 {
                record.bytes = files::bytes(&checkpoint)?;
                fs::remove_dir_all(&to)?;
                // A copy removes nothing: with older ones to remove, a save would do more.
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

    /// Trains on while checkpoints are written.
    fn in_the_background(
        &self,
        groups: &Groups,
        text: &TextData,
        record: &mut Record,
    ) -> Result<(), Error> {
        let steps = self.every * (self.samples + 1);
        let mut trainer = self.trainer(groups, steps)?;
        trainer.save_with(self.saver(groups, "background", Some(self.every))?);
        let mut watch = Watch::new(self.every);
        trainer.fit(text, &mut watch)?;
        watch.add_to(record);
        Ok(())
    }
}

fn timed<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<(T, f64), Error> {
    let started = Instant::now();
    let done = work()?;
    Ok((done, started.elapsed().as_secs_f64()))
}

/// Notes which steps were made while a checkpoint was written.
struct Watch {
    every: usize,
    /// Seconds of each step.
    steps: Vec<f64>,
    /// The steps before a checkpoint was begun and published, and the checkpoint.
    saved: Vec<(usize, Saved)>,
}

impl Watch {
    fn new(every: usize) -> Self {
        Self {
            every,
            steps: vec![],
            saved: vec![],
        }
    }

    fn add_to(self, record: &mut Record) {
        // Those of the last step are not written beside training.
        let last = self.steps.len() as u64;
        let saved = self.saved.iter().filter(|(_, saved)| saved.step < last);
        let saved: Vec<_> = saved.collect();
        let is_busy = |step: usize| {
            let within =
                |(end, saved): &&(usize, Saved)| (saved.step as usize..*end).contains(&step);
            saved.iter().any(within)
        };
        // The first steps fill pools.
        let numbers = self.every / 2..self.steps.len();
        record.step = numbers
            .filter(|step| !is_busy(*step))
            .map(|step| self.steps[step])
            .collect();
        let usual = match record.step.is_empty() {
            true => f64::NAN,
            false => median(&record.step),
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

impl Observer for Watch {
    fn step(&mut self, _: &StepMetrics, timing: &StepTiming) -> Result<(), ObserverError> {
        self.steps.push(timing.seconds);
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }

    fn saved(&mut self, saved: &Saved) -> Result<(), ObserverError> {
        self.saved.push((self.steps.len(), saved.clone()));
        Ok(())
    }
}
