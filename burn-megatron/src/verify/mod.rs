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

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::comm::{Groups, World, WorldError};
use crate::data_parallel::{DataParallelError, DistributedDataParallel};
use crate::mesh::{MeshError, ParallelConfig, share_batch};
use crate::nn::{BuildError, ParallelModule};
use crate::optim::AdamWConfig;

mod compare;
mod layout;
mod observe;
mod report;

pub use compare::{Comparison, Difference};
pub use layout::{Layout, LayoutError};
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

    /// Wraps the module for data parallelism: here the communicators of the wrapper can be replaced
    /// by ones that record or disturb its calls.
    ///
    /// # Errors
    ///
    /// See [`DistributedDataParallel::new`].
    fn wrap(
        &self,
        model: ParallelModule<Self::Model>,
        groups: &Groups,
    ) -> Result<DistributedDataParallel<Self::Model>, DataParallelError> {
        DistributedDataParallel::new(model, groups)
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
}

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
    (options.progress)("one rank");
    let one = observe_layout(subject, &Layout::default(), options)?;
    let mut rows = Vec::with_capacity(layouts.len());
    for layout in layouts {
        (options.progress)(&layout.to_string());
        let ranks = observe_layout(subject, layout, options)?;
        rows.push((*layout, Comparison::worst(&one[0], &ranks)));
    }
    Ok(Report::new(rows, options))
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
    match share_batch(subject.samples(), layout.data, layout.micro_batch) {
        Ok(_) => Ok(()),
        Err(error) => Err(VerifyError {
            layout: *layout,
            error: error.into(),
        }),
    }
}
