//! Proof that a layout computes what one rank computes.
//!
//! [`verify`] runs a small model in each [`Layout`] and on one rank, usually in f64 on the CPU, and compares
//! the initial weights (bit for bit), the loss and the gradient norm of each step, the gradient of the input,
//! every parameter's gradient in the first and in the last step, and the weights after these steps. Parts are
//! put together through the model's [`ParameterTable`](crate::nn::ParameterTable), and ranks that hold
//! the same part, on the tensor or the data axis, must hold the same bits.
//!
//! In f64 only the order of sums differs, and the [tolerance](Options::tolerance) is small; so it is of models
//! with layers in 8 bits, whose products are then added up in f64. Where a layout rounds other values than one
//! rank does, the bound follows from the type: see [`Subject::rounding`].
//!
//! A difference between two tensors is the largest absolute difference of their elements over the
//! largest absolute element of the reference.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};

use crate::comm::{Groups, World, WorldError};
use crate::data_parallel::{
    DataParallelConfig, DataParallelConfigError, DataParallelError, DistributedDataParallel,
    Precision,
};
use crate::mesh::{MeshError, ParallelConfig, share_batch};
use crate::nn::{BuildError, ParallelModule};
use crate::optim::AdamWConfig;
use crate::pipeline::engine::Output;
use crate::pipeline::schedule::ScheduleError;
use crate::pipeline::split::{LayerSplit, SplitError, StageLayout};

mod compare;
mod layout;
mod observe;
mod pass;
mod report;
mod rounding;

pub use compare::{Comparison, Difference};
pub use layout::{Layout, LayoutError, LayoutFault};
pub use observe::Observation;
pub use report::Report;
pub use rounding::Rounding;

/// A model to be verified, with its data.
pub trait Subject: Sync {
    /// The module.
    type Model: Module;

    /// Builds this rank's part from one seed for all layouts: parameters in f64 where the
    /// [`dtype`](Self::dtype) is, and in f32 elsewhere.
    ///
    /// # Errors
    ///
    /// [`BuildError`] when the model does not fit the mesh.
    fn build(
        &self,
        groups: &Groups,
        device: &Device,
        sequence_parallel: bool,
    ) -> Result<ParallelModule<Self::Model>, BuildError>;

    /// Wraps the module for data parallelism with the settings of the layout: here the communicators of the wrapper can be replaced
    /// by ones that record or disturb its calls.
    ///
    /// # Errors
    ///
    /// See [`DistributedDataParallel::with`].
    fn wrap(
        &self,
        model: ParallelModule<Self::Model>,
        groups: &Groups,
        config: &DataParallelConfig,
    ) -> Result<DistributedDataParallel<Self::Model>, DataParallelError> {
        DistributedDataParallel::with(model, groups, config)
    }

    /// The type of what passes between the layers: f64 unless the model is to be verified in another one,
    /// f32, bf16 or f16.
    fn dtype(&self) -> DType {
        DType::F64
    }

    /// What a layout rounds otherwise than one rank does, where that is more than sums in another order in
    /// f64: then the differences may be as large as its bound, and the steps are gradient steps (AdamW with
    /// an epsilon of 1), as AdamW's are of one size whatever the gradient, so that of a gradient near 0 rounding
    /// decides the direction.
    fn rounding(&self, layout: &Layout) -> Option<Rounding> {
        let _ = layout;
        None
    }

    /// The path of the weight that makes the logits, whose gradients the last stage can put off.
    fn output_weight<'a>(&self, model: &'a Self::Model) -> Option<&'a str> {
        let _ = model;
        None
    }

    /// The samples of a step, over all ranks.
    fn samples(&self) -> usize;

    /// The shape `[seq, hidden]` of one sample of the model's input after embedding.
    fn input_shape(&self) -> [usize; 2];

    /// The tokens that count in the loss of `samples`.
    fn tokens(&self, step: usize, samples: Range<usize>) -> u64;

    /// The loss of `samples`, summed over their tokens.
    ///
    /// `offset` (`[samples, seq, hidden]`, zero) is to be added to the input after embedding: its
    /// gradient is the gradient of the input.
    fn loss(
        &self,
        model: &Self::Model,
        step: usize,
        samples: Range<usize>,
        offset: Tensor<3>,
    ) -> Tensor<1>;

    /// The layers between which a pipeline can cut the model; none where it cannot be cut.
    fn layers(&self) -> usize {
        0
    }

    /// How the layers are shared out over the stages of a pipeline.
    fn split(&self) -> LayerSplit {
        LayerSplit::Even
    }

    /// Builds the stages of this rank, given as their numbers and what is in them.
    ///
    /// # Errors
    ///
    /// [`BuildError`] when the model does not fit the mesh or cannot be cut.
    fn build_stages(
        &self,
        groups: &Groups,
        device: &Device,
        sequence_parallel: bool,
        stages: &[(usize, StageLayout)],
    ) -> Result<ParallelModule<Self::Model>, BuildError> {
        let _ = (groups, device, sequence_parallel, stages);
        Err(BuildError::Config {
            path: "model".into(),
            message: "this model cannot be cut into stages; a layout with pipeline = 1 can run it"
                .into(),
        })
    }

    /// Runs one stage; only called where [`build_stages`](Self::build_stages) built it.
    fn stage(&self, model: &Self::Model, call: StageCall) -> Output {
        let _ = model;
        unreachable!("stage {} was never built", call.stage)
    }
}

/// One forward of one stage.
pub struct StageCall {
    /// The stage.
    pub stage: usize,
    /// Whether it is the last one, which gives the loss.
    pub last: bool,
    /// The step.
    pub step: usize,
    /// The samples of the micro-batch.
    pub samples: Range<usize>,
    /// What the stage before gave; none for the first.
    pub input: Option<Tensor<3>>,
    /// See [`Subject::loss`]; for the first stage only.
    pub offset: Option<Tensor<3>>,
}

/// How [`verify`] runs and judges.
#[derive(Clone, Debug)]
pub struct Options {
    /// Optimizer steps before the weights are compared.
    pub steps: usize,
    /// The largest relative difference that passes where only the order of sums differs.
    pub tolerance: f64,
    /// The learning rate of those steps.
    pub learning_rate: f64,
    /// The optimizer.
    pub optimizer: AdamWConfig,
    /// The gradient norm to which gradients are clipped; infinite where they are not.
    pub clip: f64,
    /// What the ranks of the data axis share in each layout, but for what the layout says of it itself, and for
    /// the precision, which is the [type](Subject::dtype) of the subject. Where no size of buckets is given it is
    /// small, so that small models have several. The one rank has none of this but the type of the moments.
    pub data_parallel: DataParallelConfig,
    /// How many gradients of the output weight a pipeline's last stage puts off at once: see
    /// [`Pipeline::defer_embedding_wgrad`](crate::train::Pipeline::defer_embedding_wgrad).
    pub defer_embedding_wgrad: Option<usize>,
    /// Whether the one rank has micro-batches of the size that the layout has, and not all samples at once:
    /// scales in 8 bits may be those of a micro-batch.
    pub same_micro_batches: bool,
    /// Called with the name of each layout before it runs.
    pub progress: fn(&str),
}

impl Default for Options {
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

impl Options {
    /// What the ranks of the data axis share in `layout`, of a model that computes in `dtype`.
    fn sharing(&self, layout: &Layout, dtype: DType) -> DataParallelConfig {
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

    /// The same for the one rank, which shares nothing.
    fn of_one(&self) -> Self {
        Self {
            data_parallel: DataParallelConfig {
                moments: self.data_parallel.moments,
                ..DataParallelConfig::default()
            },
            defer_embedding_wgrad: None,
            ..self.clone()
        }
    }

    /// The same with steps whose size is that of the gradients.
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
    /// What went wrong.
    pub error: LayoutFailure,
}

/// Why a layout cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum LayoutFailure {
    /// Its ranks cannot share the samples.
    #[error(transparent)]
    Samples(#[from] MeshError),
    /// Its schedule does not fit the samples.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The layers cannot be shared out over its stages.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// The data axis cannot be sharded so.
    #[error(transparent)]
    Sharding(#[from] DataParallelConfigError),
    /// A rank failed.
    #[error(transparent)]
    World(#[from] WorldError),
}

/// What a rank can fail with.
type RankError = Box<dyn std::error::Error + Send + Sync>;

/// Runs `subject` on one rank and in each layout, and compares.
///
/// # Errors
///
/// [`VerifyError`] when a layout cannot be run at all. A layout that computes something else is no
/// error but a row of the report that did not pass.
pub fn verify<S: Subject>(
    subject: &S,
    layouts: &[Layout],
    options: &Options,
) -> Result<Report, VerifyError> {
    for layout in layouts {
        check_layout(subject, layout, options)?;
    }
    let mut of_one = BTreeMap::new();
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
        let one = match of_one.entry((micro_batch, rounding.is_some())) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(one_rank(subject, micro_batch, options)?),
        };
        (options.progress)(&layout.to_string());
        let ranks = observe_layout(subject, layout, options)?;
        rows.push((*layout, Comparison::worst(one, &ranks), rounding));
    }
    Ok(Report::new(rows, options))
}

/// What one rank observes, with micro-batches of this size.
fn one_rank<S: Subject>(
    subject: &S,
    micro_batch: Option<usize>,
    options: &Options,
) -> Result<Observation, VerifyError> {
    let layout = Layout {
        micro_batch,
        ..Layout::default()
    };
    (options.progress)(match micro_batch {
        Some(_) => "one rank, with micro-batches of that size",
        None => "one rank",
    });
    Ok(observe_layout(subject, &layout, &options.of_one())?.swap_remove(0))
}

/// What each rank of a layout observes.
///
/// # Errors
///
/// See [`verify`].
pub fn observe_layout<S: Subject>(
    subject: &S,
    layout: &Layout,
    options: &Options,
) -> Result<Vec<Observation>, VerifyError> {
    let run = || {
        World::threads(layout.ranks())?.run(|rank| {
            let config = ParallelConfig::new()
                .with_tensor(layout.tensor)
                .with_pipeline(layout.pipeline)
                .with_data(layout.data);
            let groups = Groups::new(&config, &rank)?;
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
    options: &Options,
) -> Result<(), VerifyError> {
    let failed = |error: LayoutFailure| VerifyError {
        layout: *layout,
        error,
    };
    let share = share_batch(subject.samples(), layout.data, layout.micro_batch)
        .map_err(|error| failed(error.into()))?;
    let sharding = options.sharing(layout, subject.dtype());
    let sharding = sharding.check(layout.data);
    sharding.map_err(|error| failed(error.into()))?;
    if layout.pipeline > 1 {
        let schedule = layout.schedule(share);
        let schedule = schedule.map_err(|error| failed(error.into()))?;
        let stages = subject.split().stages(subject.layers(), schedule.stages());
        stages.map_err(|error| failed(error.into()))?;
    }
    Ok(())
}
