//! Checks that a layout computes the same results as one rank.
//!
//! [`verify`] trains a small model in each [`Layout`] and on one rank, usually in f64 on the CPU, with the same
//! [`Trainer`](burn_megatron_train::Trainer) as a real run. It compares:
//!
//! - the initial weights, bit for bit,
//! - the loss and the gradient norm of each step, before clipping,
//! - the gradient of every parameter in the first and in the last step, before clipping,
//! - the weights after these steps.
//!
//! Shards are assembled with the model's [`ParameterTable`](burn_megatron::nn::ParameterTable). Replicas on the tensor
//! or the data axis must be bit-equal.
//!
//! In f64 only the order of sums differs between layouts, so the [tolerance](VerifyOptions::tolerance) is small. This
//! includes models with FP8 layers, whose products are accumulated in f64. If a layout rounds other values than one
//! rank does, the bound depends on the type: see [`Subject::rounding`].
//!
//! The difference between two tensors is the largest absolute difference of their elements, divided by the largest
//! absolute element of the reference. For a gradient, the denominator is at least a hundredth of the largest gradient
//! of the model, since some gradients are zero in exact arithmetic: see [`Difference`].

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::num::NonZeroU64;
use std::sync::Arc;

use burn::tensor::{DType, Device};

use burn_megatron::comm::{ParallelContext, World, WorldError};
use burn_megatron::data_parallel::{
    DataParallelConfig, DataParallelConfigError, DataParallelError, DistributedDataParallel,
    Precision,
};
use burn_megatron::mesh::{MeshError, ParallelConfig, samples_per_rank};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::{BuildError, ParallelModule};
use burn_megatron::optim::LossScale;
use burn_megatron::pipeline::{LayoutScheduleError, stages_of};
use burn_megatron_data::Samples;
use burn_megatron_train::TrainConfig;
use burn_megatron_train::schedule::LrStyle;

mod compare;
pub mod devices;
pub mod faults;
mod guard;
mod layout;
pub mod memory_report;
mod observe;
mod report;
mod rounding;
mod subject;

pub use compare::{Comparison, Difference};
pub use devices::{DeviceOptions, DeviceReport, Oracle, check_device};
pub use guard::{Guard, GuardConfig, GuardError};
pub use layout::{Layout, LayoutPartError, ParseLayoutError};
pub use observe::Observation;
pub use report::VerifyReport;
pub use rounding::Rounding;
pub use subject::ModelSubject;

/// A model to verify, with its data.
pub trait Subject: Sync {
    /// The module.
    type Model: LanguageModel;

    /// Builds this rank's part of the model in the layout of `groups`, including its pipeline stages. The seed is the
    /// same for all layouts. Parameters are f64 if the [`dtype`](Self::dtype) is f64, or else f32.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the model does not fit the mesh.
    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Self::Model>, BuildError>;

    /// Checks that the model fits a layout, before the model is built.
    ///
    /// # Errors
    ///
    /// [`BuildError`] with the sizes that do not fit.
    fn check_layout(&self, layout: &ParallelConfig) -> Result<(), BuildError> {
        let _ = layout;
        Ok(())
    }

    /// Wraps the module for data parallelism with the settings of the layout. An implementation can replace the
    /// communicators of the wrapper with communicators that record or corrupt calls.
    ///
    /// # Errors
    ///
    /// See [`DistributedDataParallel::with`].
    fn wrap(
        &self,
        model: ParallelModule<Self::Model>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<DistributedDataParallel<Self::Model>, DataParallelError> {
        DistributedDataParallel::with(model, groups, config)
    }

    /// Returns the compute type of the model: f64 by default, or f32, bf16 or f16.
    fn dtype(&self) -> DType {
        DType::F64
    }

    /// Returns the bound on differences if a layout rounds other values than one rank does, or `None` if only the order
    /// of sums in f64 differs.
    ///
    /// With a bound, the optimizer steps are proportional to the gradient (AdamW with an epsilon of 1). The usual AdamW
    /// steps have the same size for any gradient, so rounding would determine their direction for gradients near 0.
    fn rounding(&self, layout: &Layout) -> Option<Rounding> {
        let _ = layout;
        None
    }

    /// Returns the number of samples per step over all ranks.
    fn samples(&self) -> usize;

    /// Returns the training samples. Step `s` reads the samples from index `s * samples()` on. The samples must be the
    /// same for all layouts and on all ranks. An implementation can return different samples on some ranks of `groups`
    /// to test that `verify` detects it.
    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples>;

    /// Returns whether gradients depend on the division into micro-batches: see
    /// [`ModelConfig::depends_on_micro_batches`](burn_megatron::model::ModelConfig::depends_on_micro_batches).
    fn depends_on_micro_batches(&self) -> bool {
        false
    }

    /// Returns the number of layers that a pipeline can split, or 0 if the model does not support pipelines.
    fn layers(&self) -> usize {
        0
    }
}

/// The options of [`verify`].
#[derive(Clone, Debug)]
pub struct VerifyOptions {
    /// The number of optimizer steps before the weights are compared.
    pub steps: usize,
    /// The largest relative difference that passes if only the order of sums differs.
    pub tolerance: f64,
    /// The settings of the trainer. `verify` replaces the number of steps, the batch, the compute type, the learning
    /// rate schedule and the loss scale. It also replaces the data-parallel settings that a layout has. The default
    /// bucket size is small, so that small models have several buckets.
    ///
    /// Of the data-parallel settings, the single rank uses only the type of the moments and the frozen parameters. It
    /// does not repeat steps and has no CUDA graphs. With [`cuda_graph`](TrainConfig::cuda_graph), gradients are added
    /// to static buffers, and counted and reduced as after a graph replay. The host runs the computation that would be
    /// captured.
    pub train: TrainConfig,
    /// Whether the single rank uses the micro-batch size of the layout instead of all samples at once, since FP8 scales
    /// may depend on the micro-batch. Some subjects require this even if it is not set.
    pub same_micro_batches: bool,
    /// Called with the name of each layout before it runs.
    pub progress: fn(&str),
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self {
            steps: 5,
            tolerance: 1e-10,
            train: TrainConfig {
                learning_rate: 1e-3,
                clip: 0.1,
                ..TrainConfig::default()
            },
            same_micro_batches: false,
            progress: |_| (),
        }
    }
}

impl VerifyOptions {
    /// Returns the data-parallel settings of `layout`, for a model that computes in `dtype`.
    fn data_parallel_for(&self, layout: &Layout, dtype: DType) -> DataParallelConfig {
        let DataParallelConfig {
            zero_stage,
            hsdp,
            bucket_size,
            ..
        } = layout.data_parallel();
        DataParallelConfig {
            zero_stage,
            hsdp,
            precision: match dtype {
                DType::F64 => Precision::F64,
                DType::BF16 => Precision::Bf16,
                DType::F16 => Precision::F16,
                _ => Precision::F32,
            },
            bucket_size: self.train.data_parallel.bucket_size.or(bucket_size),
            static_buffers: self.train.cuda_graph || self.train.data_parallel.static_buffers,
            ..self.train.data_parallel.clone()
        }
    }

    /// Returns the settings of the trainer, with a constant learning rate and no loss scale.
    fn train_config<S: Subject>(&self, subject: &S, layout: &Layout) -> TrainConfig {
        let samples = subject.samples();
        TrainConfig {
            steps: self.steps,
            micro_batch_size: layout
                .micro_batch
                .unwrap_or(samples / layout.parallel.data_size()),
            global_batch_size: samples,
            min_learning_rate: 0.0,
            warmup_steps: 0,
            schedule: LrStyle::Constant,
            freeze: self.train.data_parallel.freeze.clone(),
            data_parallel: self.data_parallel_for(layout, subject.dtype()),
            loss_scale: Some(LossScale::None),
            // A skipped step is visible in the report.
            skip_limit: NonZeroU64::MAX,
            // The host runs the computation that would be captured.
            cuda_graph: false,
            ..self.train.clone()
        }
    }

    /// Returns the options for the single rank.
    fn single_rank(&self) -> Self {
        let data_parallel = &self.train.data_parallel;
        let train = TrainConfig {
            data_parallel: DataParallelConfig {
                moments: data_parallel.moments,
                freeze: data_parallel.freeze.clone(),
                ..DataParallelConfig::default()
            },
            check_replay_every: None,
            cuda_graph: false,
            ..self.train.clone()
        };
        Self {
            train,
            ..self.clone()
        }
    }

    /// Returns the same options with steps that are proportional to the gradients.
    fn with_gradient_steps(&self) -> Self {
        Self {
            train: TrainConfig {
                learning_rate: 0.1,
                optimizer: self.train.optimizer.clone().with_gradient_steps(),
                ..self.train.clone()
            },
            ..self.clone()
        }
    }
}

/// The error of a layout that cannot be run.
#[derive(Debug, thiserror::Error)]
#[error("layout {layout}: {error}")]
pub struct VerifyError {
    /// The layout.
    pub layout: Box<Layout>,
    /// The cause.
    pub error: LayoutRunError,
}

/// Reasons why a layout cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum LayoutRunError {
    /// The model does not fit the layout.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A setting has no effect, or the samples cannot be divided over the ranks.
    #[error(transparent)]
    Samples(#[from] MeshError),
    /// The schedule does not fit the samples, or the stages do not fit the layers.
    #[error(transparent)]
    Schedule(#[from] LayoutScheduleError),
    /// The sharding of the data axis is invalid.
    #[error(transparent)]
    Sharding(#[from] DataParallelConfigError),
    /// A rank failed.
    #[error(transparent)]
    World(#[from] WorldError),
}

/// The error of a rank.
type RankError = Box<dyn std::error::Error + Send + Sync>;

/// Runs `subject` on one rank and in each layout, and compares the results. If a layout cannot run, the other layouts
/// still run: see [`VerifyReport::not_run`].
///
/// # Errors
///
/// [`VerifyError`] if the single rank or every layout cannot be run. A layout with different results is not an error,
/// but a failing row of the report.
pub fn verify<S: Subject>(
    subject: &S,
    layouts: &[Layout],
    options: &VerifyOptions,
) -> Result<VerifyReport, VerifyError> {
    let mut references = BTreeMap::new();
    let (mut rows, mut not_run) = (vec![], vec![]);
    for layout in layouts {
        if let Err(error) = check_layout(subject, layout, options) {
            not_run.push(error);
            continue;
        }
        let rounding = subject.rounding(layout);
        let options = match &rounding {
            Some(_) => &options.with_gradient_steps(),
            None => options,
        };
        let own = subject.samples() / layout.parallel.data_size();
        let size = layout.micro_batch.unwrap_or(own);
        let same = options.same_micro_batches || subject.depends_on_micro_batches();
        let micro_batch = same.then_some(size);
        let reference = match references.entry((micro_batch, rounding.is_some())) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(run_reference(subject, micro_batch, options)?),
        };
        (options.progress)(&layout.to_string());
        match observe_layout(subject, layout, options) {
            Ok(ranks) => {
                let comparison = Comparison::worst(reference, &ranks);
                rows.push((layout.clone(), comparison, rounding));
            }
            Err(error) => not_run.push(error),
        }
    }
    if rows.is_empty() && !not_run.is_empty() {
        return Err(not_run.swap_remove(0));
    }
    let not_run = not_run.into_iter();
    let not_run = not_run.map(|VerifyError { layout, error }| (*layout, error.to_string()));
    Ok(VerifyReport::new(rows, not_run.collect(), options))
}

/// Runs a single rank with micro-batches of this size and returns its observation.
fn run_reference<S: Subject>(
    subject: &S,
    micro_batch: Option<usize>,
    options: &VerifyOptions,
) -> Result<Observation, VerifyError> {
    let layout = Layout {
        micro_batch,
        ..Layout::default()
    };
    (options.progress)(match micro_batch {
        Some(_) => "one rank, with micro-batches of that size",
        None => "one rank",
    });
    Ok(observe_layout(subject, &layout, &options.single_rank())?.swap_remove(0))
}

/// Runs a layout and returns the observation of each rank.
///
/// # Errors
///
/// See [`verify`].
pub fn observe_layout<S: Subject>(
    subject: &S,
    layout: &Layout,
    options: &VerifyOptions,
) -> Result<Vec<Observation>, VerifyError> {
    let run = || {
        World::threads(layout.ranks())?.run(|rank| {
            let groups = ParallelContext::new(&layout.parallel, &rank)?;
            observe::observe(subject, layout, &groups, options)
        })
    };
    check_layout(subject, layout, options)?;
    run().map_err(|error: WorldError| VerifyError {
        layout: Box::new(layout.clone()),
        error: error.into(),
    })
}

fn check_layout<S: Subject>(
    subject: &S,
    layout: &Layout,
    options: &VerifyOptions,
) -> Result<(), VerifyError> {
    check_run(subject, layout, options).map_err(|error| VerifyError {
        layout: Box::new(layout.clone()),
        error,
    })
}

fn check_run<S: Subject>(
    subject: &S,
    layout: &Layout,
    options: &VerifyOptions,
) -> Result<(), LayoutRunError> {
    let parallel = &layout.parallel;
    parallel.check().map_err(MeshError::from)?;
    subject.check_layout(parallel)?;
    let share = samples_per_rank(subject.samples(), parallel.data_size(), layout.micro_batch)?;
    options
        .data_parallel_for(layout, subject.dtype())
        .check(parallel.data_parallel_size())?;
    if parallel.pipeline > 1 {
        layout.schedule(share)?;
        stages_of(parallel, subject.layers())?;
    }
    Ok(())
}
