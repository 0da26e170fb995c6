//! Checks that a layout computes the same as one rank.
//!
//! [`verify`] runs a small model in each [`Layout`] and on one rank, usually in f64 on the CPU, and compares
//! the initial weights (bit for bit), the loss and the gradient norm of each step, the gradient of the input,
//! every parameter's gradient in the first and in the last step, and the weights after these steps. Shards are
//! assembled with the model's [`ParameterTable`](crate::nn::ParameterTable), and replicas, on the tensor or
//! the data axis, must be bit-equal.
//!
//! In f64 only the order of sums differs, and the [tolerance](VerifyOptions::tolerance) is small; also for models
//! with FP8 layers, whose products are then accumulated in f64. If a layout rounds other values than one rank
//! does, the bound follows from the type: see [`Subject::rounding`].
//!
//! A difference between two tensors is the largest absolute difference of their elements over the
//! largest absolute element of the reference.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};

use crate::comm::{ParallelContext, World, WorldError};
use crate::data_parallel::{
    DataParallelConfig, DataParallelConfigError, DataParallelError, DistributedDataParallel,
    Precision,
};
use crate::mesh::{MeshError, ParallelConfig, samples_per_rank};
use crate::nn::{BuildError, ParallelModule};
use crate::optim::AdamWConfig;
use crate::pipeline::engine::StageOutput;
use crate::pipeline::schedule::ScheduleError;
use crate::pipeline::split::{LayerSplit, SplitError, StageLayout};

mod compare;
mod layout;
mod observe;
mod pass;
mod report;
mod rounding;

pub use compare::{Comparison, Difference};
pub use layout::{Layout, LayoutPartError, ParseLayoutError};
pub use observe::Observation;
pub use report::VerifyReport;
pub use rounding::Rounding;

/// A model to verify, with its data.
pub trait Subject: Sync {
    /// The module.
    type Model: Module;

    /// Builds this rank's shard of the model, with the same seed for all layouts. Parameters are f64 if the
    /// [`dtype`](Self::dtype) is, else f32.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the model does not fit the mesh.
    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
        sequence_parallel: bool,
    ) -> Result<ParallelModule<Self::Model>, BuildError>;

    /// Wraps the module for data parallelism with the settings of the layout. An implementation can replace the
    /// communicators of the wrapper by ones that record or corrupt calls.
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

    /// The compute type of the model: f64 by default, or f32, bf16 or f16.
    fn dtype(&self) -> DType {
        DType::F64
    }

    /// The bound on differences, if a layout rounds other values than one rank does; `None` if only the order of
    /// sums in f64 differs. With a bound, the steps are proportional to the gradient (AdamW with an epsilon of
    /// 1): AdamW's own steps have the same size for any gradient, so rounding would determine the direction for
    /// gradients near 0.
    fn rounding(&self, layout: &Layout) -> Option<Rounding> {
        let _ = layout;
        None
    }

    /// The path of the output layer's weight, whose gradients the last stage can defer.
    fn output_weight<'a>(&self, model: &'a Self::Model) -> Option<&'a str> {
        let _ = model;
        None
    }

    /// The number of samples per step, over all ranks.
    fn samples(&self) -> usize;

    /// The shape `[seq, hidden]` of one sample after the embedding.
    fn input_shape(&self) -> [usize; 2];

    /// The number of unmasked tokens of `samples`.
    fn tokens(&self, step: usize, samples: Range<usize>) -> u64;

    /// The loss of `samples`, summed over their tokens.
    ///
    /// `offset` (`[samples, seq, hidden]`, zero) must be added to the output of the embedding: its gradient is
    /// the gradient of the input.
    fn loss(
        &self,
        model: &Self::Model,
        step: usize,
        samples: Range<usize>,
        offset: Tensor<3>,
    ) -> Tensor<1>;

    /// The number of layers that a pipeline can split; 0 if the model does not support pipelines.
    fn layers(&self) -> usize {
        0
    }

    /// The distribution of layers over pipeline stages.
    fn split(&self) -> LayerSplit {
        LayerSplit::Even
    }

    /// Builds the stages of this rank, given as pairs of index and layout.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the model does not fit the mesh or does not support pipelines.
    fn build_stages(
        &self,
        groups: &ParallelContext,
        device: &Device,
        sequence_parallel: bool,
        stages: &[(usize, StageLayout)],
    ) -> Result<ParallelModule<Self::Model>, BuildError> {
        let _ = (groups, device, sequence_parallel, stages);
        Err(BuildError::Config {
            path: "model".into(),
            message: "this model does not support pipelines: use a layout with pipeline = 1".into(),
        })
    }

    /// Runs one stage that [`build_stages`](Self::build_stages) has built.
    fn stage(&self, model: &Self::Model, call: StageCall) -> StageOutput {
        let _ = model;
        unreachable!("stage {} was not built", call.stage)
    }
}

/// One forward of one stage.
pub struct StageCall {
    /// The index of the stage.
    pub stage: usize,
    /// Whether it is the last stage, which returns the loss.
    pub last: bool,
    /// The step.
    pub step: usize,
    /// The samples of the micro-batch.
    pub samples: Range<usize>,
    /// The output of the previous stage; `None` for the first.
    pub input: Option<Tensor<3>>,
    /// See [`Subject::loss`]; `Some` only for the first stage.
    pub offset: Option<Tensor<3>>,
}

/// The options of [`verify`].
#[derive(Clone, Debug)]
pub struct VerifyOptions {
    /// Optimizer steps before the weights are compared.
    pub steps: usize,
    /// The largest relative difference that passes if only the order of sums differs.
    pub tolerance: f64,
    /// The learning rate.
    pub learning_rate: f64,
    /// The optimizer.
    pub optimizer: AdamWConfig,
    /// The maximum gradient norm; infinite for no clipping.
    pub clip: f64,
    /// The data-parallel settings of each layout, except those that the layout itself has, and the precision,
    /// which is the [type](Subject::dtype) of the subject. The default bucket size is small, so that small models
    /// have several buckets. The single rank only uses the type of the moments.
    pub data_parallel: DataParallelConfig,
    /// The maximum number of gradients of the output layer's weight that the last stage defers: see
    /// [`PipelineConfig::defer_embedding_wgrad`](crate::train::PipelineConfig::defer_embedding_wgrad).
    pub defer_embedding_wgrad: Option<usize>,
    /// Whether the single rank uses micro-batches of the size of the layout instead of all samples at once, as
    /// FP8 scales may depend on the micro-batch.
    pub same_micro_batches: bool,
    /// Called with the name of each layout before it runs.
    pub progress: fn(&str),
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self {
            steps: 5,
            tolerance: 1e-10,
            learning_rate: 1e-3,
            optimizer: AdamWConfig::default(),
            clip: 0.1,
            data_parallel: DataParallelConfig::default(),
            defer_embedding_wgrad: None,
            same_micro_batches: false,
            progress: |_| (),
        }
    }
}

impl VerifyOptions {
    /// The data-parallel settings of `layout`, for a model that computes in `dtype`.
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
                DType::BF16 => Precision::Bf16,
                DType::F16 => Precision::F16,
                _ => Precision::F32,
            },
            bucket_size: self.data_parallel.bucket_size.or(bucket_size),
            ..self.data_parallel.clone()
        }
    }

    /// The options for the single rank.
    fn single_rank(&self) -> Self {
        Self {
            data_parallel: DataParallelConfig {
                moments: self.data_parallel.moments,
                ..DataParallelConfig::default()
            },
            defer_embedding_wgrad: None,
            ..self.clone()
        }
    }

    /// The same options with steps proportional to the gradients.
    fn with_gradient_steps(&self) -> Self {
        Self {
            learning_rate: 0.1,
            optimizer: AdamWConfig {
                epsilon: 1.0,
                ..self.optimizer.clone()
            },
            ..self.clone()
        }
    }
}

/// A layout that cannot be run.
#[derive(Debug, thiserror::Error)]
#[error("layout {layout}: {error}")]
pub struct VerifyError {
    /// The layout.
    pub layout: Layout,
    /// The cause.
    pub error: LayoutRunError,
}

/// Why a layout cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum LayoutRunError {
    /// The samples are not divisible over its ranks.
    #[error(transparent)]
    Samples(#[from] MeshError),
    /// Its schedule does not fit the samples.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The layers cannot be distributed over its stages.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// Invalid sharding of the data axis.
    #[error(transparent)]
    Sharding(#[from] DataParallelConfigError),
    /// A rank failed.
    #[error(transparent)]
    World(#[from] WorldError),
}

/// The error of a rank.
type RankError = Box<dyn std::error::Error + Send + Sync>;

/// Runs `subject` on one rank and in each layout, and compares the results.
///
/// # Errors
///
/// [`VerifyError`] if a layout cannot be run. A layout with other results is not an error, but a failing
/// row of the report.
pub fn verify<S: Subject>(
    subject: &S,
    layouts: &[Layout],
    options: &VerifyOptions,
) -> Result<VerifyReport, VerifyError> {
    for layout in layouts {
        check_layout(subject, layout, options)?;
    }
    let mut references = BTreeMap::new();
    let mut rows = Vec::with_capacity(layouts.len());
    for layout in layouts {
        let rounding = subject.rounding(layout);
        let options = match &rounding {
            Some(_) => &options.with_gradient_steps(),
            None => options,
        };
        let own = subject.samples() / layout.data;
        let size = layout.micro_batch.unwrap_or(own);
        let micro_batch = options.same_micro_batches.then_some(size);
        let reference = match references.entry((micro_batch, rounding.is_some())) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(run_reference(subject, micro_batch, options)?),
        };
        (options.progress)(&layout.to_string());
        let ranks = observe_layout(subject, layout, options)?;
        rows.push((*layout, Comparison::worst(reference, &ranks), rounding));
    }
    Ok(VerifyReport::new(rows, options))
}

/// The observation of a single rank, with micro-batches of this size.
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
            let config = ParallelConfig::new()
                .with_tensor(layout.tensor)
                .with_pipeline(layout.pipeline)
                .with_data(layout.data);
            let groups = ParallelContext::new(&config, &rank)?;
            observe::observe(subject, layout, &groups, options)
        })
    };
    check_layout(subject, layout, options)?;
    run().map_err(|error: WorldError| VerifyError {
        layout: *layout,
        error: error.into(),
    })
}

fn check_layout<S: Subject>(
    subject: &S,
    layout: &Layout,
    options: &VerifyOptions,
) -> Result<(), VerifyError> {
    let failed = |error: LayoutRunError| VerifyError {
        layout: *layout,
        error,
    };
    let share = samples_per_rank(subject.samples(), layout.data, layout.micro_batch)
        .map_err(|error| failed(error.into()))?;
    options
        .data_parallel_for(layout, subject.dtype())
        .check(layout.data)
        .map_err(|error| failed(error.into()))?;
    if layout.pipeline > 1 {
        let schedule = layout
            .schedule(share)
            .map_err(|error| failed(error.into()))?;
        subject
            .split()
            .stages(subject.layers(), schedule.stages())
            .map_err(|error| failed(error.into()))?;
    }
    Ok(())
}
