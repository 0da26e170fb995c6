//! Proof that a layout computes what one rank computes.
//!
//! [`verify`] runs a small model in each [`Layout`] and on one rank, in f64 on the CPU, and compares
//! the initial weights (bit for bit), the loss, the gradient of the input, every parameter's
//! gradient and the gradient norm, and the weights after a few optimizer steps. Parts are put
//! together through the model's [`ParameterTable`](crate::nn::ParameterTable), and ranks that hold
//! the same part, on the tensor or the data axis, must hold the same bits.
//!
//! A difference between two tensors is the largest absolute difference of their elements over the
//! largest absolute element of the reference.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::comm::{Groups, World, WorldError};
use crate::data_parallel::{
    DataParallelConfig, DataParallelConfigError, DataParallelError, DistributedDataParallel,
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

pub use compare::{Comparison, Difference};
pub use layout::{Layout, LayoutError, LayoutFault};
pub use observe::Observation;
pub use report::Report;

/// A model to be verified, with its data.
pub trait Subject: Sync {
    /// The module.
    type Model: Module;

    /// Builds this rank's part in f64, from one seed for all layouts.
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

/// The tolerance for models with layers in 8 bits, which are compared with one rank in 8 bits: the distance
/// of neighbours in E5M2, whose mantissa has 2 bits, over the smaller one. Where rounding in the last digits
/// of f32 puts a value on the other side of a tie, it becomes the neighbour; mostly it does not, and
/// differences are near 1e-6.
pub const FP8_TOLERANCE: f64 = 0.25;

/// How [`verify`] runs and judges.
#[derive(Clone, Debug)]
pub struct Options {
    /// Optimizer steps before the weights are compared.
    pub steps: usize,
    /// The largest relative difference that passes.
    pub tolerance: f64,
    /// The learning rate of those steps.
    pub learning_rate: f64,
    /// The optimizer.
    pub optimizer: AdamWConfig,
    /// The gradient norm to which gradients are clipped.
    pub clip: f64,
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
            same_micro_batches: false,
            progress: |_| (),
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
        check_samples(subject, layout)?;
    }
    let mut of_one = BTreeMap::new();
    let mut rows = Vec::with_capacity(layouts.len());
    for layout in layouts {
        let own = subject.samples() / layout.data;
        let size = layout.micro_batch.unwrap_or(own);
        let micro_batch = options.same_micro_batches.then_some(size);
        let one = match of_one.entry(micro_batch) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(one_rank(subject, micro_batch, options)?),
        };
        (options.progress)(&layout.to_string());
        let ranks = observe_layout(subject, layout, options)?;
        rows.push((*layout, Comparison::worst(one, &ranks)));
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
    Ok(observe_layout(subject, &layout, options)?.swap_remove(0))
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
    check_samples(subject, layout)?;
    run().map_err(|error: WorldError| VerifyError {
        layout: *layout,
        error: error.into(),
    })
}

fn check_samples<S: Subject>(subject: &S, layout: &Layout) -> Result<(), VerifyError> {
    let failed = |error: LayoutFailure| VerifyError {
        layout: *layout,
        error,
    };
    let share = share_batch(subject.samples(), layout.data, layout.micro_batch)
        .map_err(|error| failed(error.into()))?;
    let sharding = layout.data_parallel().check(layout.data);
    sharding.map_err(|error| failed(error.into()))?;
    if layout.pipeline > 1 {
        let schedule = layout.schedule(share);
        let schedule = schedule.map_err(|error| failed(error.into()))?;
        let stages = subject.split().stages(subject.layers(), schedule.stages());
        stages.map_err(|error| failed(error.into()))?;
    }
    Ok(())
}
