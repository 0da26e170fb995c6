//! A run with forced overflows, and all that it reports and saves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, io};

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::Precision;
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::optim::{LossScale, LossScaleConfig};
use burn_megatron_data::TextData;
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{Observer, ObserverError, SaveConfig, Saver, TrainConfig, Trainer};
use burn_megatron_verify::Layout;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The results and the final state of a rank. Numbers are stored as text, so that NaN equals itself.
#[derive(Debug, Default, PartialEq)]
pub struct RankReport {
    /// The metrics of each step.
    pub steps: Vec<String>,
    /// The number of each skipped step.
    pub skipped: Vec<usize>,
    /// The loss scale of each step.
    pub scales: Vec<Option<f64>>,
    /// The metrics of each evaluation, and the outcome of the run.
    pub held_out: Vec<String>,
    /// The bits of the parameters.
    pub weights: Vec<Vec<u64>>,
    /// The counters and the loss scale at the end.
    pub state: String,
}

impl Observer for RankReport {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.steps.push(format!("{metrics:?}"));
        self.skipped.extend(metrics.skipped.then_some(metrics.step));
        self.scales.push(metrics.loss_scale);
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.held_out.push(format!("{metrics:?}"));
        Ok(())
    }
}

/// The results of a run.
#[derive(Debug, PartialEq)]
pub struct RunReport {
    /// The reports by rank.
    pub ranks: Vec<RankReport>,
    /// The files of its checkpoints, by path.
    pub files: BTreeMap<PathBuf, Vec<u8>>,
}

/// Returns settings in which about every third step overflows. The loss scale grows fast and starts at a large value.
pub fn overflowing(precision: Precision, initial: f64) -> TrainConfig {
    let mut config = TrainConfig {
        steps: 20,
        global_batch_size: 8,
        learning_rate: 4e-3,
        min_learning_rate: 4e-4,
        warmup_steps: 4,
        held_out_samples: 4,
        evaluate_every: Some(7),
        loss_scale: Some(LossScale::Dynamic(LossScaleConfig {
            initial,
            growth: 64.0,
            backoff: 0.125,
            growth_interval: 2,
            hysteresis: 1,
            ..LossScaleConfig::default()
        })),
        ..TrainConfig::default()
    };
    config.data_parallel.precision = precision;
    config
}

/// The settings of a run: the training configuration, the FP8 configuration of the layers, and optional experts.
pub type RunSettings<'a> = (&'a TrainConfig, &'a Fp8Config, Option<&'a MoeConfig>);

/// Trains a small Llama on the text, saves every five steps, and returns a report. `defers` selects deferred
/// readings.
///
/// # Panics
///
/// Panics if the run fails.
pub fn train(
    device: &Device,
    layout: &str,
    (config, fp8, moe): RunSettings,
    text: &TextData,
    defers: bool,
) -> RunReport {
    let layout: Layout = layout.parse().unwrap();
    let folder = temporary_folder();
    let mut config = config.clone();
    config.micro_batch_size = layout.micro_batch.unwrap_or(1);
    let run = |groups: &ParallelContext| -> Result<RankReport, AnyError> {
        let precision = config.data_parallel.precision;
        // Two samples of 16 tokens form two chunks.
        let kernels = KernelChoices {
            loss_chunk_size: Some(20),
            ..KernelChoices::default()
        };
        let scope = ModelBuilder::with(groups, device, 1, precision.master())
            .with_compute_dtype(precision.of(precision.master()))
            .with_kernels(&kernels)?
            .with_fp8(fp8)?;
        let model = TransformerConfig {
            context: 16,
            hidden: 32,
            layers: 2,
            heads: 2,
            groups: Some(1),
            dropout: 0.1,
            moe: moe.cloned(),
            ..TransformerConfig::llama()
        };
        let mut trainer = Trainer::new(model.init_with(scope)?, groups, device, &config)?;
        trainer.defer_readings(defers)?;
        trainer.save_with(Saver::open(
            SaveConfig {
                every: Some(5),
                ..SaveConfig::into_folder(&folder)
            },
            groups,
        )?);
        let mut report = RankReport::default();
        let outcome = trainer.fit(text, &mut report)?;
        trainer.model().check_replicas()?;
        report.held_out.push(format!("{outcome:?}"));
        report.state = format!("{:?}", trainer.state());
        report.weights = trainer.model().parameters().into_iter().map(bits).collect();
        Ok(report)
    };
    let world = World::threads(layout.ranks()).unwrap();
    let ranks = world.run(|rank| run(&ParallelContext::new(&layout.parallel, &rank)?));
    let mut files = BTreeMap::new();
    collect(&folder, &folder, &mut files).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    RunReport {
        ranks: ranks.unwrap(),
        files,
    }
}

fn bits(tensor: Tensor<1>) -> Vec<u64> {
    let values = tensor.into_data().convert_dtype(DType::F64);
    values.iter::<f64>().map(f64::to_bits).collect()
}

fn temporary_folder() -> PathBuf {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!(
        "burn-megatron-overflows-{}-{number}",
        std::process::id()
    ))
}

fn collect(root: &Path, folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(root, &path, files)?;
        } else if let Ok(name) = path.strip_prefix(root) {
            files.insert(name.to_path_buf(), fs::read(&path)?);
        }
    }
    Ok(())
}

/// Checks that the run has skipped some steps after it had taken some steps, and has saved four checkpoints.
///
/// # Panics
///
/// Panics if this is not the case.
pub fn assert_overflows(run: &RunReport, what: &str) {
    let report = &run.ranks[0];
    assert_eq!(report.steps.len(), 20, "{what}");
    let skipped = &report.skipped;
    assert!(
        (3..15).contains(&skipped.len()),
        "{what}: {skipped:?} were skipped"
    );
    let first_taken = (1..=20).find(|step| !skipped.contains(step));
    assert!(first_taken < skipped.last().copied(), "{what}: {skipped:?}");
    let saved = |step: usize| {
        let has = |path: &PathBuf| path.to_string_lossy().contains(&format!("{step}"));
        run.files.keys().any(has)
    };
    assert!(
        [5, 10, 15, 20].into_iter().all(saved),
        "{what}: {:?}",
        run.files.keys()
    );
}
