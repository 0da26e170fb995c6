//! Runs a schedule on one rank.
//!
//! Each forward builds a graph of its own, from the received activation to the stage's output. The
//! output is sent and freed while its graph lives; the backward starts from the gradient that comes
//! back. Weight gradients of linear layers can be put off to an action of their own.

use std::time::Instant;

use burn::tensor::{Device, Gradients, Tensor};

use super::schedule::{Action, Invalid, Schedule, validate};
use crate::collective::Comm;
use crate::comm::CommError;
use crate::nn::door::DeferringSink;

mod forward_only;
mod link;
mod seed;
mod state;

pub use forward_only::forward_only;
use state::State;

/// What runs the stages of one rank.
pub trait Stage {
    /// Runs a stage on a micro-batch. `input` is the activation of the stage before, tracked; the
    /// first stage has none.
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> Output;

    /// Called after the backward of a stage, with the gradients of leaves that the stage made.
    fn after_backward(&self, stage: usize, micro_batch: usize, leaves: &mut Gradients) {
        let _ = (stage, micro_batch, leaves);
    }
}

/// What a stage gives.
pub enum Output {
    /// The input of the next stage: `[batch, seq, hidden]`.
    Activation(Tensor<3>),
    /// The loss of the micro-batch, summed over its tokens: the last stage.
    Loss(Tensor<1>),
}

/// One action as it was run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// The action.
    pub action: Action,
    /// When it began.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
}

/// What one rank saw of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The sum of the losses of the micro-batches; zero where the last stage is elsewhere.
    pub loss: f64,
    /// What was run, in order.
    pub events: Vec<Event>,
    /// The most activations that were kept at once, over all stages of this rank, as
    /// [`Report::peak_activations`](super::schedule::Report::peak_activations) counts them.
    pub peak_activations: usize,
}

/// A schedule that cannot be run, or did not run to its end.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// The schedule breaks a rule.
    #[error(transparent)]
    Invalid(Box<Invalid>),
    /// The schedule is for another number of ranks.
    #[error("the schedule is for {schedule} ranks, the pipeline has {pipeline}")]
    Ranks {
        /// The ranks of the schedule.
        schedule: usize,
        /// The ranks of the pipeline axis.
        pipeline: usize,
    },
    /// What was sent did not arrive.
    #[error("pipeline rank {rank}, sending: {source}")]
    Sends {
        /// The rank of the pipeline axis.
        rank: usize,
        /// What went wrong.
        source: Box<CommError>,
    },
    /// An action failed.
    #[error("pipeline rank {rank}, {}: {source}", action.describe())]
    Action {
        /// The rank of the pipeline axis.
        rank: usize,
        /// The action at which it stopped.
        action: Action,
        /// What went wrong.
        source: Box<CommError>,
    },
}

/// Runs the schedule of one rank.
pub struct Engine<'a> {
    schedule: &'a Schedule,
    comm: &'a Comm,
    device: Device,
    sink: &'a dyn DeferringSink,
}

impl<'a> Engine<'a> {
    /// An engine for the ranks of `comm`, whose parameters hand their gradients to `sink`.
    ///
    /// # Errors
    ///
    /// [`EngineError`] for a schedule that breaks a rule, or is for another number of ranks.
    pub fn new(
        schedule: &'a Schedule,
        comm: &'a Comm,
        device: &Device,
        sink: &'a dyn DeferringSink,
    ) -> Result<Self, EngineError> {
        validate(schedule).map_err(|invalid| EngineError::Invalid(Box::new(invalid)))?;
        if schedule.ranks() != comm.size() {
            return Err(EngineError::Ranks {
                schedule: schedule.ranks(),
                pipeline: comm.size(),
            });
        }
        let device = device.clone().inner();
        Ok(Self {
            schedule,
            comm,
            device,
            sink,
        })
    }

    /// Runs all actions of this rank.
    ///
    /// # Errors
    ///
    /// [`EngineError::Action`] names the action in which another rank was found missing. A failure
    /// inside of a stage unwinds with [`raise`](crate::comm::raise).
    pub fn run(&self, model: &impl Stage) -> Result<Run, EngineError> {
        let mut state = State::new(self.schedule, self.comm, &self.device, self.sink);
        let mut events = vec![];
        for action in self.schedule.actions(self.comm.rank()) {
            let start = Instant::now();
            let _span = tracing::debug_span!("action", %action).entered();
            state
                .perform(action, model)
                .map_err(|source| EngineError::Action {
                    rank: self.comm.rank(),
                    action: *action,
                    source: Box::new(source),
                })?;
            events.push(Event {
                action: *action,
                start,
                end: Instant::now(),
            });
        }
        state.finish().map_err(|source| EngineError::Sends {
            rank: self.comm.rank(),
            source: Box::new(source),
        })?;
        Ok(Run {
            loss: state.loss(),
            peak_activations: state.peak_activations(),
            events,
        })
    }
}
