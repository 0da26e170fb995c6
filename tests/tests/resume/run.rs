//! Small runs that save and resume.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Device};
use burn_megatron::checkpoint::state::StateError;
use burn_megatron::checkpoint::{Checkpoint, LoadTolerance, TensorSlice, TensorSource};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::kernel_selection::KernelChoices;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_models::{MoeConfig, Transformer, TransformerConfig};
use burn_megatron_tests::Text;
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{
    NoopObserver, Observer, ObserverError, SaveConfig, SavedCheckpoint, Saver, TrainConfig,
    TrainError, Trainer,
};
use burn_megatron_verify::Layout;

pub type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// A temporary folder.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("burn-megatron-resume-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// All settings of a run.
#[derive(Clone)]
pub struct Case {
    pub model: TransformerConfig,
    pub layout: Layout,
    pub fp8: Fp8Config,
    pub kernels: KernelChoices,
    /// The training configuration. Data parallelism is defined by the layout, except for types.
    pub train: TrainConfig,
    pub asynchronous: bool,
    pub every: Option<u64>,
}

impl Case {
    /// Returns six steps of a small Llama: grouped queries, SwiGLU, an untied output weight, dropout.
    pub fn llama(layout: &str) -> Self {
        let model = TransformerConfig {
            context: 16,
            hidden: 16,
            layers: 4,
            heads: 4,
            groups: Some(2),
            mlp_width: Some(24),
            dropout: 0.05,
            tied: false,
            ..TransformerConfig::llama()
        };
        let train = TrainConfig {
            steps: 6,
            global_batch_size: 12,
            learning_rate: 1e-2,
            min_learning_rate: 1e-3,
            warmup_steps: 2,
            held_out_samples: 5,
            evaluate_every: Some(3),
            ..TrainConfig::default()
        };
        Self {
            model,
            layout: layout.parse().unwrap(),
            fp8: Fp8Config::default(),
            kernels: KernelChoices::default(),
            train,
            asynchronous: false,
            every: None,
        }
    }

    /// Returns the same run with a GPT: learned positions, biases, tied weights, a padded vocabulary.
    pub fn gpt(layout: &str) -> Self {
        let llama = Self::llama(layout);
        let model = TransformerConfig {
            vocabulary_divisible_by: 100,
            context: 16,
            hidden: 16,
            layers: 4,
            heads: 4,
            dropout: 0.05,
            attention_dropout: 0.05,
            ..TransformerConfig::gpt2()
        };
        Self {
            model: TransformerConfig {
                vocabulary: llama.model.vocabulary,
                ..model
            },
            ..llama
        }
    }

    /// Returns the same run with experts in every other block. The router uses a bias.
    pub fn experts(layout: &str) -> Self {
        let llama = Self::llama(layout);
        let moe = MoeConfig {
            experts: 4,
            expert_width: Some(10),
            every: 2,
            score: ScoreFunction::Sigmoid,
            bias_update_rate: Some(0.01),
            shared_width: Some(6),
            ..MoeConfig::default()
        };
        Self {
            model: TransformerConfig {
                moe: Some(moe),
                ..llama.model
            },
            ..llama
        }
    }

    /// Returns the same run with another split of the layers over the stages.
    pub fn split(&self, split: LayerSplit) -> Self {
        let mut case = self.clone();
        case.layout.parallel.split = split;
        case
    }

    pub fn layout(&self, layout: &str) -> Self {
        Self {
            layout: layout.parse().unwrap(),
            ..self.clone()
        }
    }

    fn config(&self) -> TrainConfig {
        let own = &self.train.data_parallel;
        let mut config = self.train.clone();
        config.micro_batch_size = self.layout.micro_batch.unwrap_or(1);
        // Several buckets, and parameters that span two shards.
        config.data_parallel.bucket_size = self.layout.data_parallel().bucket_size;
        config.data_parallel.bucket_size = own.bucket_size.or(config.data_parallel.bucket_size);
        config
    }

    pub fn ranks(&self) -> usize {
        self.layout.ranks()
    }

    /// Returns the trainer of a rank.
    pub fn trainer(&self, groups: &ParallelContext) -> Result<Trainer<Transformer>, AnyError> {
        let (device, config) = (Device::flex(), self.config());
        let precision = config.data_parallel.precision;
        let computing = precision.of(DType::F32);
        let scope = ModelBuilder::with(groups, &device, config.seed, precision.master())
            .with_compute_dtype(computing)
            .with_kernels(&self.kernels)?
            .with_fp8(&self.fp8)?;
        let model = self.model.init_with(scope)?;
        Ok(Trainer::new(model, groups, &device, &config)?)
    }

    /// Runs a function on every rank.
    pub fn on_ranks<T: Send>(
        &self,
        run: impl Fn(&ParallelContext) -> Result<T, AnyError> + Sync,
    ) -> Result<Vec<T>, String> {
        let mesh = &self.layout.parallel;
        let world = World::threads(self.ranks()).unwrap();
        let world = world.deadline(std::time::Duration::from_secs(60));
        let run = world.run(|rank| run(&ParallelContext::new(mesh, &rank)?));
        run.map_err(|error| error.to_string())
    }

    /// Trains from a checkpoint or from the start until step `stop`, and saves into `into`.
    pub fn run(&self, from: Option<&Path>, stop: usize, into: Option<&Path>) -> Vec<Seen> {
        let text = Text::new();
        let text = text.open();
        let run = |groups: &ParallelContext| {
            let mut trainer = self.trainer(groups)?;
            if let Some(from) = from {
                trainer.load(&Checkpoint::open(from)?, LoadTolerance::default())?;
            }
            if let Some(into) = into {
                trainer.save_with(Saver::open(self.saving(into), groups)?);
            }
            let mut seen = Seen {
                stop,
                ..Seen::default()
            };
            let outcome = trainer.fit(&text, &mut seen)?;
            assert_eq!(outcome.steps, stop);
            seen.losses = outcome.held_out.unwrap().loss;
            let bits = |tensor: burn::tensor::Tensor<1>| -> Vec<u64> {
                let values = tensor.into_data();
                values.iter::<f64>().map(f64::to_bits).collect()
            };
            seen.weights = trainer.model().parameters().into_iter().map(bits).collect();
            trainer.model().check_replicas()?;
            Ok(seen)
        };
        self.on_ranks(run).unwrap()
    }

    pub fn saving(&self, into: &Path) -> SaveConfig {
        SaveConfig {
            asynchronous: self.asynchronous,
            every: self.every,
            layout: self.layout.to_string(),
            deadline: std::time::Duration::from_secs(30),
            ..SaveConfig::into_folder(into)
        }
    }

    /// Loads a checkpoint and immediately saves it. Returns the loss of the next step.
    pub fn pass_on(&self, from: &Path, into: &Path) -> f64 {
        let text = Text::new();
        let text = text.open();
        let run = |groups: &ParallelContext| {
            let mut trainer = self.trainer(groups)?;
            trainer.load(&Checkpoint::open(from)?, LoadTolerance::default())?;
            trainer.save_with(Saver::open(self.saving(into), groups)?);
            trainer.save()?;
            let samples = text.samples(self.model.context, self.train.seed)?;
            Ok(trainer.step(&samples, &mut NoopObserver)?.loss)
        };
        self.on_ranks(run).unwrap()[0]
    }

    /// Returns the error of loading on every rank, or `None`.
    pub fn errors(&self, from: &Path, leniency: LoadTolerance) -> Vec<Option<String>> {
        let run = |groups: &ParallelContext| {
            let mut trainer = self.trainer(groups)?;
            match trainer.load(&Checkpoint::open(from)?, leniency) {
                Err(TrainError::State(StateError::Comm(error))) => Err(error.into()),
                loaded => Ok(loaded.err().map(|error| error.to_string())),
            }
        };
        self.on_ranks(run).unwrap()
    }
}

/// The observations and the final state of a rank.
#[derive(Default)]
pub struct Seen {
    pub steps: Vec<StepMetrics>,
    pub held_out: Vec<HeldOutMetrics>,
    pub saved: Vec<SavedCheckpoint>,
    pub weights: Vec<Vec<u64>>,
    pub losses: f64,
    stop: usize,
}

impl Observer for Seen {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.steps.push(*metrics);
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.held_out.push(*metrics);
        Ok(())
    }

    fn saved(&mut self, saved: &SavedCheckpoint) -> Result<(), ObserverError> {
        self.saved.push(saved.clone());
        Ok(())
    }

    fn stop(&self) -> bool {
        self.steps.last().is_some_and(|step| step.step == self.stop)
    }
}

/// Returns the `Debug` text of each element. It is the shortest text that parses to the same bits.
pub fn lines<T: std::fmt::Debug>(of: &[T]) -> Vec<String> {
    of.iter().map(|line| format!("{line:?}")).collect()
}

/// Asserts that two checkpoints have bit-equal tensors and the same state.
pub fn assert_same(name: &str, one: &Path, other: &Path) {
    let [one, other] = [one, other].map(|path| Checkpoint::open(path).unwrap());
    assert_eq!(one.keys(), other.keys(), "{name}");
    for key in one.keys() {
        let meta = one.tensor(&key).unwrap();
        assert_eq!(other.tensor(&key).as_ref(), Some(&meta), "{name}");
        let whole = TensorSlice::whole(&meta.shape);
        let [a, b] = [&one, &other].map(|from| from.read(&key, &whole).unwrap());
        assert!(a == b, "{name}: {key}");
        assert!(a.iter().any(|byte| *byte != 0), "{name}: {key} is zeros");
    }
    assert_eq!(one.objects(), other.objects(), "{name}");
    for key in one.objects() {
        assert_eq!(
            one.object(&key).unwrap(),
            other.object(&key).unwrap(),
            "{name}: {key}"
        );
    }
    assert_eq!(one.metadata().state, other.metadata().state, "{name}");
    assert_eq!(one.metadata().step, other.metadata().step, "{name}");
    assert_eq!(one.metadata().samples, other.metadata().samples, "{name}");
}
