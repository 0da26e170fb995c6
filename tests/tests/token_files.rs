//! Tests of runs on token files: the results are the same in every layout, also when resumed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::tensor::Device;
use burn_megatron::checkpoint::{Checkpoint, LoadTolerance};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron_data::indexed::{IndexedDatasetBuilder, TokenType};
use burn_megatron_data::{
    DataError, Dataset, Sample, Samples, Sampling, TokenFile, TokenFiles, TokenFilesConfig,
};
use burn_megatron_models::{Transformer, TransformerConfig};
use burn_megatron_tests::tolerance::{CLOSE, assert_near, assert_steps_near};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, SaveConfig, Saver, TrainConfig, Trainer};
use burn_megatron_verify::Layout;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const SEQ: usize = 16;
const STEPS: usize = 6;
const BATCH: usize = 8;
const VOCABULARY: u32 = 50;

/// The token that ends a document.
const EOD: u32 = 0;

/// A temporary folder with two pairs of token files: 80 documents of 3 to 30 tokens each.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("token-files-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        for (number, name) in ["a", "b"].into_iter().enumerate() {
            let mut writer =
                IndexedDatasetBuilder::create(&folder.join(name), TokenType::U16).unwrap();
            for document in 0..80 {
                // Each file counts with a different step, so that there is something to learn.
                let step = 1 + 2 * number as u32;
                let token = |place| 1 + (document * 11 + place * step) % (VOCABULARY - 1);
                let length = 2 + document * 7 % 28;
                let tokens: Vec<u32> = (0..length).map(token).chain([EOD]).collect();
                writer.document(&tokens).unwrap();
            }
            writer.finish().unwrap();
        }
        Self(folder)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn config(&self, kind: Kind) -> TokenFilesConfig {
        let file = |name: &str, weight| TokenFile {
            prefix: self.join(name),
            weight: Some(weight),
        };
        TokenFilesConfig {
            split: "80,20".parse().unwrap(),
            vocabulary: Some(VOCABULARY as usize),
            eod: Some(EOD as i32),
            packing: kind == Kind::Packed,
            reset_attention: kind == Kind::Reset,
            ..TokenFilesConfig::new(vec![file("a", 2.0), file("b", 1.0)])
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The arrangement of documents in samples.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Concatenated, with attention across documents.
    Plain,
    /// Concatenated, without attention across documents.
    Reset,
    /// Packed into rows.
    Packed,
}

/// Token files that record which samples are read.
struct Watched {
    files: TokenFiles,
    read: Arc<Mutex<BTreeSet<u64>>>,
}

struct WatchedSamples {
    samples: Arc<dyn Samples>,
    read: Arc<Mutex<BTreeSet<u64>>>,
}

impl Samples for WatchedSamples {
    fn seq(&self) -> usize {
        self.samples.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.read.lock().unwrap().insert(number);
        self.samples.sample(number)
    }
}

impl Dataset for Watched {
    fn describe(&self) -> String {
        self.files.describe()
    }

    fn fingerprint(&self) -> u64 {
        self.files.fingerprint()
    }

    fn vocabulary(&self) -> usize {
        self.files.vocabulary()
    }

    fn training(&self, sampling: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(WatchedSamples {
            samples: self.files.training(sampling)?,
            read: Arc::clone(&self.read),
        }))
    }

    fn held_out(&self, seq: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        self.files.held_out(seq, max)
    }
}

/// The results of a run.
struct Run {
    steps: Vec<StepMetrics>,
    held_out: f64,
    read: BTreeSet<u64>,
}

/// Stops after this number of steps of the run.
struct Seen(Vec<StepMetrics>, usize);

impl Observer for Seen {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.0.push(*metrics);
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }

    fn stop(&self) -> bool {
        self.0.last().is_some_and(|last| last.step >= self.1)
    }
}

fn trainer(layout: &Layout, groups: &ParallelContext) -> Result<Trainer<Transformer>, AnyError> {
    let model = TransformerConfig {
        vocabulary: VOCABULARY as usize,
        context: SEQ,
        hidden: 16,
        layers: 2,
        heads: 4,
        groups: Some(2),
        mlp_width: Some(24),
        dropout: 0.0,
        ..TransformerConfig::llama()
    };
    let config = TrainConfig {
        steps: STEPS,
        micro_batch_size: layout.micro_batch.unwrap_or(2),
        global_batch_size: BATCH,
        learning_rate: 1e-2,
        min_learning_rate: 1e-3,
        warmup_steps: 2,
        held_out_samples: 5,
        ..TrainConfig::default()
    };
    let device = Device::flex();
    let scope = ModelBuilder::new(groups, &device);
    let model = model.init_with(scope)?;
    Ok(Trainer::new(model, groups, &device, &config)?)
}

/// Trains from a checkpoint or from the start until `stop` steps are done, and saves into `into`.
fn train(
    config: &TokenFilesConfig,
    layout: &str,
    from: Option<&Path>,
    stop: usize,
    into: Option<&Path>,
) -> Run {
    let layout: Layout = layout.parse().unwrap();
    let data = Watched {
        files: config.clone().open().unwrap(),
        read: Arc::default(),
    };
    let world = World::threads(layout.ranks()).unwrap();
    let run = world.deadline(Duration::from_secs(60)).run(|rank| {
        let groups = ParallelContext::new(&layout.parallel, &rank)?;
        let mut trainer = trainer(&layout, &groups)?;
        if let Some(from) = from {
            trainer.load(&Checkpoint::open(from)?, LoadTolerance::default())?;
        }
        if let Some(into) = into {
            let saving = SaveConfig {
                layout: layout.to_string(),
                deadline: Duration::from_secs(30),
                ..SaveConfig::into_folder(into)
            };
            trainer.save_with(Saver::open(saving, &groups)?);
        }
        let mut seen = Seen(vec![], stop);
        let outcome = trainer.fit(&data, &mut seen)?;
        Ok::<_, AnyError>((seen.0, outcome.held_out.unwrap().loss))
    });
    let mut ranks = run.unwrap();
    let (steps, held_out) = ranks.swap_remove(0);
    let read = data.read.lock().unwrap().clone();
    Run {
        steps,
        held_out,
        read,
    }
}

#[test]
fn every_layout_trains_as_one_rank_does() {
    let folder = Folder::new("layouts");
    let mut firsts = vec![];
    for kind in [Kind::Plain, Kind::Reset, Kind::Packed] {
        let config = folder.config(kind);
        let one = train(&config, "tp1", None, STEPS, None);
        assert_eq!(one.steps.len(), STEPS);
        assert!(one.read.iter().copied().eq(0..(STEPS * BATCH) as u64));
        assert!(one.held_out < one.steps[0].loss, "it learns");
        for layout in [
            "dp2",
            "tp2",
            "tp2-sp",
            "pp2-mb2",
            "tp2-dp2",
            "pp2-dp2-mb1",
            "dp2-z3",
        ] {
            let other = train(&config, layout, None, STEPS, None);
            let what = format!("{kind:?}, {layout}");
            assert_steps_near(&what, &one.steps, &other.steps);
            assert_near(&what, other.held_out, one.held_out, CLOSE);
            assert_eq!(one.read, other.read, "{what}");
        }
        firsts.push(one.steps[0].loss);
    }
    // The arrangement of documents makes a difference.
    firsts.dedup();
    assert_eq!(firsts.len(), 3);
}

#[test]
fn a_resumed_run_continues_with_the_next_samples_in_any_layout() {
    let folder = Folder::new("resume");
    for kind in [Kind::Reset, Kind::Packed] {
        let config = folder.config(kind);
        let whole = train(&config, "dp2", None, STEPS, None);
        let half = folder.join(&format!("{kind:?}"));
        let first = train(&config, "dp2", None, 3, Some(&half));
        assert_steps_near("until it stops", &whole.steps[..3], &first.steps);
        for layout in ["tp1", "dp2", "dp4-mb1", "tp2-dp2"] {
            let second = train(&config, layout, Some(&half), STEPS, None);
            let what = format!("{kind:?}, {layout}");
            assert_steps_near(&what, &whole.steps[3..], &second.steps);
            assert_near(&what, second.held_out, whole.held_out, CLOSE);
            let next = (3 * BATCH) as u64..(STEPS * BATCH) as u64;
            assert!(
                second.read.iter().copied().eq(next),
                "{what}: {:?}",
                second.read
            );
        }
    }
}
