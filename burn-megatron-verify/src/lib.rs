//! Checks that a parallel layout computes the same results as a single rank.
//!
//! [`verify`] trains a small model in each [`Layout`] and on one rank, usually in f64 on the CPU. It uses the same
//! [`Trainer`](burn_megatron_train::Trainer) as a real training run. It compares:
//!
//! - the initial weights, bit for bit,
//! - the loss and the gradient norm of each step, before clipping,
//! - the gradient of every parameter in the first and in the last step, before clipping,
//! - the weights after the last step.
//!
//! The [`ParameterTable`](burn_megatron::nn::ParameterTable) of the model describes how shards are assembled to full
//! tensors. Replicas on the tensor-parallel and data-parallel ranks must be bit-equal.
//!
//! In f64, only the order of additions differs between layouts, so the [tolerance](VerifyOptions::tolerance) is small.
//! This is also the case for models with FP8 layers, whose matrix multiplications are accumulated in f64. If a layout
//! rounds other values than a run on one rank does, the tolerance depends on the dtype: see [`Subject::rounding`].
//!
//! The difference between two tensors is the largest absolute difference of their elements, divided by the largest
//! absolute element of the reference. For a gradient, the divisor is at least a hundredth of the largest gradient of
//! the model, because some gradients are zero in exact arithmetic: see [`Difference`].

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

/// A model to verify, with its training data.
pub trait Subject: Sync {
    /// The module type of the model.
    type Model: LanguageModel;

    /// Builds the part of the model that belongs to this rank, in the layout of `groups`. The weights must be
    /// initialized with the same seed in all layouts. Parameters are f64 if [`dtype`](Self::dtype) is f64, and f32
    /// otherwise.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the model cannot be split over the mesh.
    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Self::Model>, BuildError>;

    /// Checks that the model can be split over a layout, before it is built.
    ///
    /// # Errors
    ///
    /// [`BuildError`], which names the sizes that cannot be split.
    fn check_layout(&self, layout: &ParallelConfig) -> Result<(), BuildError> {
        let _ = layout;
        Ok(())
    }

    /// Wraps the module for data parallelism with the settings of the layout. Implement this method to replace the
    /// communicators of the wrapper, for example with communicators that record or corrupt calls.
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

    /// Returns the compute dtype of the model: f64, f32, bf16 or f16. The default implementation returns f64.
    fn dtype(&self) -> DType {
        DType::F64
    }

    /// Returns the bound on differences if a layout rounds other values than a run on one rank does. Returns `None` if
    /// only the order of additions in f64 differs.
    ///
    /// If there is a bound, `verify` sets the epsilon of AdamW to 1, so that updates are about proportional to the
    /// gradient. With a small epsilon, the size of an update does not depend on the size of the gradient. Rounding
    /// errors would then determine the direction of the update for gradients near 0.
    fn rounding(&self, layout: &Layout) -> Option<Rounding> {
        let _ = layout;
        None
    }

    /// Returns the number of samples per step over all ranks.
    fn samples(&self) -> usize;

    /// Returns the training samples. Step `s` reads [`samples`](Self::samples) samples, starting at index `s *
    /// samples()`. The samples must be the same in all layouts and on all ranks. A test of `verify` may return
    /// different samples on some ranks of `groups`, which `verify` must detect.
    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples>;

    /// Returns whether the gradients depend on how the samples are divided into micro-batches: see
    /// [`ModelConfig::depends_on_micro_batches`](burn_megatron::model::ModelConfig::depends_on_micro_batches).
    fn depends_on_micro_batches(&self) -> bool {
        false
    }

    /// Returns the number of layers that can be split into pipeline stages, or 0 if the model does not support pipeline
    /// parallelism.
    fn layers(&self) -> usize {
        0
    }
}

/// The options of [`verify`].
#[derive(Clone, Debug)]
pub struct VerifyOptions {
    /// The number of training steps.
    pub steps: usize,
    /// The largest relative difference that passes if only the order of additions differs.
    pub tolerance: f64,
    /// The settings of the trainer. `verify` overwrites the number of steps, the batch size, the compute dtype, the
    /// learning rate schedule and the loss scale. It also overwrites the data-parallel settings that belong to a
    /// layout. The default bucket size is small, so that even small models have several gradient buckets.
    ///
    /// The run on one rank uses only two of the data-parallel settings: the dtype of the moments and the frozen
    /// parameters. It does not repeat steps and does not use CUDA graphs. With [`cuda_graph`](TrainConfig::cuda_graph),
    /// the runs in the layouts add gradients to static buffers. The gradients are counted and reduced as after a graph
    /// replay. No graph is captured: the computation runs normally.
    pub train: TrainConfig,
    /// Whether the run on one rank uses the micro-batch size of the layout, instead of one micro-batch with all
    /// samples. This is needed if results depend on the samples in a micro-batch, as FP8 scales may do. It is always
    /// enabled if [`Subject::depends_on_micro_batches`] returns true.
    pub same_micro_batches: bool,
    /// A function that is called with the name of each layout before the layout runs.
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
            // No graph is captured: the host runs the computation.
            cuda_graph: false,
            ..self.train.clone()
        }
    }

    /// Returns the options for the run on one rank.
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

    /// Returns the same options with an optimizer whose updates are about proportional to the gradients.
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

/// The error for a layout that cannot be run.
#[derive(Debug, thiserror::Error)]
#[error("layout {layout}: {error}")]
pub struct VerifyError {
    /// The layout that cannot be run.
    pub layout: Box<Layout>,
    /// The reason why the layout cannot be run.
    pub error: LayoutRunError,
}

/// The reason why a layout cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum LayoutRunError {
    /// The model cannot be split over the layout.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A setting has no effect, or the samples cannot be divided over the ranks.
    #[error(transparent)]
    Samples(#[from] MeshError),
    /// The pipeline schedule does not support the number of samples, or the layers cannot be divided into the pipeline
    /// stages.
    #[error(transparent)]
    Schedule(#[from] LayoutScheduleError),
    /// The sharding over the data axis is invalid.
    #[error(transparent)]
    Sharding(#[from] DataParallelConfigError),
    /// A rank failed during the run.
    #[error(transparent)]
    World(#[from] WorldError),
}

/// The error of a rank.
type RankError = Box<dyn std::error::Error + Send + Sync>;

/// Trains the model of `subject` on one rank and in each layout, and compares the results. If a layout cannot run, the
/// other layouts still run: see [`VerifyReport::not_run`].
///
/// # Errors
///
/// [`VerifyError`] if the run on one rank fails, or if no layout can be run. A layout with different results is not an
/// error: it is a failing row of the report.
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

/// Trains the model on a single rank with micro-batches of this size, and returns the results.
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

/// Trains the model of `subject` in one layout, and returns the results of each rank.
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
